"""What changes the logits of one answer before a token is chosen.

In: raw logits and the tokens so far. Out: logits with repeated tokens made less likely. The grammar
(`grammar.Constraint`) is the other processor; sampling filters come after all of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from typing import Protocol, Self

import torch
from torch import Tensor


class Processor(Protocol):
    """`apply` never changes its argument; `accept` is told every token of the answer in turn."""

    def apply(self, logits: Tensor) -> Tensor: ...
    def accept(self, token: int) -> None: ...
    def fork(self) -> Self: ...


class RepetitionPenalty:
    """Divides positive and multiplies negative logits of all tokens in the prompt and the answer.

    CTRL (Keskar et al., 2019), as in transformers' `RepetitionPenaltyLogitsProcessor`.
    """

    def __init__(self, penalty: float, prompt_ids: Iterable[int]) -> None:
        self._penalty = penalty
        self._seen = set(map(int, prompt_ids))
        self._index = torch.tensor(list(self._seen), dtype=torch.long)  # shared, never written to

    def apply(self, logits: Tensor) -> Tensor:
        self._index = self._index.to(logits.device)
        score = logits[self._index]
        score = torch.where(score < 0, score * self._penalty, score / self._penalty)
        return logits.index_copy(0, self._index, score)

    def accept(self, token: int) -> None:
        if token not in self._seen:
            self._seen.add(token)
            self._index = torch.cat([self._index, self._index.new_tensor([token])])

    def fork(self) -> Self:
        forked = copy(self)
        forked._seen = self._seen.copy()
        return forked
