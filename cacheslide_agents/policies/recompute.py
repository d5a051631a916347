"""The policy that reuses nothing: the dense reference."""

from __future__ import annotations

from dataclasses import dataclass

from cacheslide_agents.policies.base import Population, Reuse
from cacheslide_agents.policies.plain import Plain


@dataclass(frozen=True)
class Recompute(Plain):
    """Full recomputation; the reference of every quality figure."""

    name: str = "recompute"
    population: Population = Population.NONE
    reuse: Reuse = Reuse.NOTHING
    min_run: int = 1
