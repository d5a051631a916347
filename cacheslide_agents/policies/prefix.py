"""The policy of today's servers: reuse up to the first change, and nothing after it."""

from __future__ import annotations

from dataclasses import dataclass

from cacheslide_agents.policies.base import Population, Reuse
from cacheslide_agents.policies.plain import Plain, check_min_run


@dataclass(frozen=True)
class Prefix(Plain):
    """Exact-prefix caching, as vLLM's automatic prefix caching (ContextCache in the paper).

    Takes the longest head that any stored context holds exactly; the result is the dense one.
    Departs from vLLM in that the head is not rounded down to whole blocks of 16 tokens; `min_run`
    is one such block.
    """

    name: str = "prefix"
    min_run: int = 16
    population: Population = Population.CONTEXT
    reuse: Reuse = Reuse.EXACT_PREFIX

    def __post_init__(self) -> None:
        check_min_run(self.name, self.min_run)
