"""Agents' requests to train on: prompts as they were sent, with their answers.

In: logs of requests as `cacheslide replay` reads them, a tokenizer. Out: token ids, and where the
answers begin in them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cacheslide_agents.errors import DataError
from cacheslide_agents.prompt.chat import ChatEncoder
from cacheslide_agents.prompt.logged import LoggedRequest, read_trace


@dataclass(frozen=True, slots=True)
class Example:
    """`ids` int64 [n]: a prompt of `prompt` tokens and its answer, which may be empty."""

    ids: npt.NDArray[np.int64]
    prompt: int


class Requests:
    """Those of `paths` that have `longest` tokens at most, answer included, in one order a round.

    `too_long` counts the others. Raises `DataError` for a line that is no request, for tokens that
    a model with `vocabulary` tokens does not have, and when no request is left.
    """

    def __init__(
        self, paths: Sequence[Path], tokenizer: Any, *, vocabulary: int, longest: int, seed: int
    ) -> None:
        found = list(_examples(paths, tokenizer, vocabulary))
        self._kept = [each for each in found if len(each.ids) <= longest]
        self.too_long, self._seed = len(found) - len(self._kept), seed
        if not self._kept:
            raise DataError(
                f"all {len(found)} requests of {', '.join(map(str, paths))} are longer than "
                f"{longest} tokens; give shorter ones, or raise longest_request"
            )

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def digest(self) -> str:
        found = hashlib.sha256()
        for each in self._kept:
            found.update(f"{each.prompt} {len(each.ids)} ".encode())
            found.update(each.ids.tobytes())
        return found.hexdigest()

    def drawn(self, number: int) -> Example:
        """Request `number` of an endless row: all of them in every round, each round shuffled."""
        around, at = divmod(number, len(self._kept))
        order = np.random.default_rng((self._seed, around)).permutation(len(self._kept))
        return self._kept[int(order[at])]


def _examples(paths: Iterable[Path], tokenizer: Any, vocabulary: int) -> Iterator[Example]:
    encoder = ChatEncoder(tokenizer)
    for path in paths:
        for request in read_trace(path):
            prompt, answer = request.encode(encoder).ids, _answer(request, tokenizer)
            ids = np.array([*prompt, *answer], dtype=np.int64)
            if ids.max() >= vocabulary:
                raise DataError(
                    f"{request.where}: token {ids.max()} is beyond the model's {vocabulary}; give "
                    "requests of this model, or their text"
                )
            yield Example(ids, len(prompt))


def _answer(request: LoggedRequest, tokenizer: Any) -> Sequence[int]:
    if isinstance(request.output, tuple):
        return request.output
    found: Sequence[int] = tokenizer(request.output, add_special_tokens=False)["input_ids"]
    return found
