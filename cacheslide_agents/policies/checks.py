"""Whether a request can be answered at all, by any backend.

In: requests and token ids. Out: nothing, or an error that names what is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cacheslide_agents.backend import GenerationRequest
from cacheslide_agents.errors import ContextOverflowError, RequestError
from cacheslide_agents.policies.base import Policy
from cacheslide_agents.policies.draft import Prompt


@dataclass(frozen=True)
class Checks:
    """`vocabulary`: token ids there are. `window`: tokens of a prompt and its answer."""

    vocabulary: int
    window: int

    def request(self, request: GenerationRequest, policy: Policy, room: int = 1) -> None:
        """As `prompt`; and `RequestError` for spans with gaps or overlaps."""
        self.prompt(request.prompt_ids, room)
        ids = np.asarray(request.prompt_ids, dtype=np.int64)
        Prompt(ids, tuple(request.spans), policy).check()

    def prompt(self, ids: Sequence[int], room: int = 1) -> None:
        """`RequestError`, or `ContextOverflowError` if `room` new tokens do not fit."""
        count = self.ids("prompt_ids", ids)
        if count + room > self.window:
            raise ContextOverflowError(count, self.window, room)

    def ids(self, name: str, ids: Sequence[int]) -> int:
        """How many they are. `RequestError` names `name`; what is not whole is never cut off."""
        try:
            array = np.asarray(ids)
        except ValueError:  # rows of different lengths
            array = np.array(None)
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iuO"):
            raise RequestError(f"{name} must be one flat sequence of integer token ids")
        if not array.size:
            raise RequestError(f"{name} is empty; give at least one token")
        if array.dtype.kind == "O" and not all(isinstance(each, int) for each in ids):
            raise RequestError(f"{name} must be one flat sequence of integer token ids")
        low, high = array.min(), array.max()
        if low < 0 or high >= self.vocabulary:
            raise RequestError(
                f"{name} holds {low if low < 0 else high}, outside the vocabulary of "
                f"{self.vocabulary}; is this the model's own tokenizer?"
            )
        return len(array)


def policy_of(request: GenerationRequest, otherwise: Policy) -> Policy:
    """The request's own, or `otherwise`; `RequestError` if it is none."""
    policy = request.policy if request.policy is not None else otherwise
    if not isinstance(policy, Policy):
        raise RequestError(f"policy {policy!r} is not one; see cacheslide_agents.policies")
    return policy
