"""What changes the logits of one answer before a token is chosen.

In: raw logits and the tokens so far. Out: logits with repeated tokens made less likely. The grammar
(`grammar.Constraint`) is the other processor; sampling filters come after all of them.
"""

from __future__ import annotations

from collections.abc import Iterable
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
        self._seen = frozenset(map(int, prompt_ids))

    def apply(self, logits: Tensor) -> Tensor:
        ids = torch.tensor(list(self._seen), device=logits.device)
        score = logits[ids]
        score = torch.where(score < 0, score * self._penalty, score / self._penalty)
        return logits.index_copy(0, ids, score)

    def accept(self, token: int) -> None:
        self._seen |= {token}

    def fork(self) -> RepetitionPenalty:
        return RepetitionPenalty(self._penalty, self._seen)
