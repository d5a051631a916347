"""Whether a request can go to the engine at all.

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
        """`RequestError`, or `ContextOverflowError` if `room` new tokens do not fit."""
        count = self.ids("prompt_ids", request.prompt_ids)
        if count + room > self.window:
            raise ContextOverflowError(count, self.window, room)
        ids = np.asarray(request.prompt_ids, dtype=np.int64)
        Prompt(ids, tuple(request.spans), policy).check()

    def ids(self, name: str, ids: Sequence[int]) -> int:
        """How many; `RequestError`, which calls them `name`, for what are no token ids."""
        array = np.asarray(ids)
        if array.ndim != 1 or not array.size or array.dtype.kind not in "iu":
            raise RequestError(f"{name} must be one flat sequence of at least one token id")
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
