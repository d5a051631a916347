"""EPIC: chunks computed alone, corrected at their beginnings."""

from __future__ import annotations

from dataclasses import dataclass

from cacheslide_agents.errors import RequestError
from cacheslide_agents.policies.base import Population, Reuse
from cacheslide_agents.policies.plain import Plain, check_min_run, reuse_of
from cacheslide_agents.selection import Boundary


@dataclass(frozen=True)
class Epic(Plain):
    """Position-independent caching with LegoLink (Hu et al., ICML 2025, "EPIC").

    The first `tokens` of every reused chunk but the prompt's first are recomputed; `math.inf` makes
    the prefill dense. With `population=Population.CONTEXT` (`epic_context`) the caches are those of
    the previous request, and the first tokens of every reused run after a change are recomputed.
    """

    tokens: float = 64
    min_run: int = 16
    population: Population = Population.ISOLATED

    def __post_init__(self) -> None:
        check_min_run(self.name, self.min_run)
        if not self.tokens >= 0:
            raise RequestError(f"Epic(tokens={self.tokens!r}) must be at least 0")

    @property
    def name(self) -> str:
        return "epic_context" if self.reuse is Reuse.RUNS else "epic"

    @property
    def reuse(self) -> Reuse:
        return reuse_of(self.population)

    @property
    def selector(self) -> Boundary:
        return Boundary(tokens=self.tokens, min_run=0)
