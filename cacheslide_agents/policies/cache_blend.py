"""CacheBlend: chunks computed alone, corrected where their keys deviate most."""

from __future__ import annotations

from dataclasses import dataclass

from cacheslide_agents.errors import RequestError
from cacheslide_agents.policies.base import Population, Reuse
from cacheslide_agents.policies.plain import Plain, check_min_run, reuse_of
from cacheslide_agents.selection import KeyDeviation
from cacheslide_agents.selection.budget import check_fraction


@dataclass(frozen=True)
class CacheBlend(Plain):
    """Selective recomputation of high-deviation tokens (Yao et al., EuroSys 2025, "CacheBlend").

    Layers 0..`layer` run for every token after the head; the `fraction` of the reused tokens with
    the largest key deviation at `layer` is corrected above it. Departs from the paper in that the
    choice is made once and not narrowed from layer to layer, and looks at keys alone, not keys and
    values. With `population=Population.CONTEXT` (`cache_blend_context`) the caches are those of the
    previous request and not of chunks alone, which CacheBlend does not do.
    """

    fraction: float = 0.18
    layer: int = 1
    min_run: int = 16
    population: Population = Population.ISOLATED

    def __post_init__(self) -> None:
        check_min_run(self.name, self.min_run)
        check_fraction(self, self.fraction)
        if self.layer < 0:
            raise RequestError(f"CacheBlend(layer={self.layer!r}) must be at least 0")

    @property
    def name(self) -> str:
        return "cache_blend_context" if self.reuse is Reuse.RUNS else "cache_blend"

    @property
    def reuse(self) -> Reuse:
        return reuse_of(self.population)

    @property
    def selector(self) -> KeyDeviation:
        return KeyDeviation(layer=self.layer, fraction=self.fraction, noise=0.0)
