"""What every step reads: windows of running text, or requests of agents.

In: a corpus, perhaps requests, a recipe. Out: for each step of a phase its windows, the same on
every run, so that a resumed run needs no reader state.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cacheslide_agents.training.corpus import Corpus
from cacheslide_agents.training.recipe import PHASES, Recipe
from cacheslide_agents.training.requests import Example, Requests

PLACES = 1_000_000
"""Steps that a phase may have before its places in the text are those of the next one."""


@dataclass(frozen=True, slots=True)
class Window:
    """`ids` [n], and what each position counts for: `weights` float64 [n], 1 together."""

    ids: Tensor
    weights: Tensor

    def to(self, device: torch.device) -> Window:
        return Window(self.ids.to(device), self.weights.to(device))


@dataclass(frozen=True, slots=True)
class _Step:
    """Text of `length` tokens, or requests from number `first` on."""

    length: int = 0
    first: int | None = None


class Material:
    def __init__(self, corpus: Corpus, recipe: Recipe, requests: Requests | None = None) -> None:
        corpus.check(recipe.lengths)
        self._corpus, self._recipe, self._requests = corpus, recipe, requests
        self.requests = len(requests) if requests else 0
        self.too_long = requests.too_long if requests else 0

    @property
    def digests(self) -> list[str]:
        """Of all that is read."""
        return [self._corpus.digest, *([self._requests.digest] if self._requests else [])]

    def steps(self, phase: str) -> int:
        """Optimizer steps of `transfer` or `distil`."""
        return len(self._plans[phase])

    def windows(self, phase: str, step: int) -> list[Window]:
        plan, count = self._plans[phase][step], self._recipe.sequences
        if plan.first is None:
            first = (PHASES.index(phase) * PLACES + step) * count
            places = range(first, first + count)
            return [even(self._corpus.window(place, plan.length)) for place in places]
        return [_weighted(each, self._recipe.answer_weight) for each in self._drawn(plan.first)]

    def _drawn(self, first: int) -> list[Example]:
        assert self._requests is not None
        return [self._requests.drawn(first + at) for at in range(self._recipe.sequences)]

    @cached_property
    def _plans(self) -> dict[str, list[_Step]]:
        """Requests go on in the second phase where the first one ended."""
        plans: dict[str, list[_Step]] = {}
        drawn = 0
        for phase in PHASES:
            plans[phase], drawn = self._planned(self._recipe.tokens(phase), drawn)
        return plans

    def _planned(self, tokens: int, drawn: int) -> tuple[list[_Step], int]:
        """Steps of `tokens` tokens, of which requests have their share, and who is drawn next."""
        recipe = self._recipe
        share = recipe.request_share if self._requests else 0.0
        steps: list[_Step] = []
        of_text = of_requests = texts = 0
        while of_text + of_requests < tokens:
            if of_requests < share * (of_text + of_requests):
                of_requests += sum(len(each.ids) for each in self._drawn(drawn))
                steps.append(_Step(first=drawn))
                drawn += recipe.sequences
            else:
                length = recipe.lengths[texts % len(recipe.lengths)]
                of_text, texts = of_text + length * recipe.sequences, texts + 1
                steps.append(_Step(length))
        return steps, drawn


def even(ids: npt.NDArray[np.int64]) -> Window:
    """All positions count alike."""
    weights = torch.full((len(ids),), 1.0 / len(ids), dtype=torch.float64)
    return Window(torch.from_numpy(ids), weights)


def _weighted(request: Example, answer_weight: float) -> Window:
    """The positions that predict the answer together count `answer_weight`."""
    tokens, answer = len(request.ids), len(request.ids) - request.prompt
    if not answer:
        return even(request.ids)
    weights = torch.full((tokens,), answer_weight / (answer + 1), dtype=torch.float64)
    first = request.prompt - 1
    if first:
        weights[:first] = (1.0 - answer_weight) / first
    return Window(torch.from_numpy(request.ids), weights / weights.sum())
