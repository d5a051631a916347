"""The families of policies the frontier compares: one generator each.

In: nothing (the oracle: a populated turn). Out: `Variant`s, cheap first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from cacheslide_agents.backend import Backend
from cacheslide_agents.bench.measure import Populated
from cacheslide_agents.bench.studies.oracle import deviating_positions
from cacheslide_agents.policies import CacheBlend, CacheSlide, Epic, Policy, Population
from cacheslide_agents.selection import (
    Affinity,
    AfterRemoval,
    Boundary,
    Fixed,
    KeyCosine,
    KeyDeviation,
    Selector,
    Tail,
    Union,
)

FRACTIONS = (0.0, 0.01, 0.02, 0.03, 0.05, 0.10, 0.15, 0.26)
BOUNDARIES = (0, 8, 16, 32, 64)
_GATES: tuple[Literal["literal", "converged"], ...] = ("literal", "converged")


@dataclass(frozen=True, slots=True)
class Variant:
    """One point's policy; `fraction` is the selector's budget, `None` where it has none."""

    policy: Policy
    selector: str
    fraction: float | None

    @property
    def label(self) -> str:
        return f"{self.policy.name}/{self.selector}/{self.fraction}"


def affinity() -> Iterator[Variant]:
    """Token overlap with the changed words, with and without the first tokens of each run."""
    for boundary in BOUNDARIES:
        for fraction in FRACTIONS:
            chosen = Union(Affinity(fraction), Boundary(boundary))
            yield Variant(_cacheslide(chosen), f"affinity+boundary{boundary}", fraction)


def default() -> Iterator[Variant]:
    """What `CacheSlide()` takes, with more or less of token overlap."""
    for fraction in (0.0, 0.01, 0.03, 0.05, 0.10):
        chosen = Union(Affinity(fraction), Boundary(16), AfterRemoval(64), Tail(64))
        yield Variant(_cacheslide(chosen), "default", fraction)


def key_cosine() -> Iterator[Variant]:
    """Likeness to the update's new keys in mid-model, alone and joined with token overlap."""
    for fraction in (0.03, 0.05, 0.10):
        for name, scores in {
            "key_cosine": (KeyCosine(),),
            "affinity+key_cosine": (*Affinity().scores, KeyCosine()),
        }.items():
            chosen = Union(Affinity(fraction, scores), Boundary())
            yield Variant(_cacheslide(chosen), f"{name}+boundary16", fraction)


def key_deviation() -> Iterator[Variant]:
    """The paper's choice of tokens, with our fusion and with its own, gated and not."""
    for fraction in (0.05, 0.10, 0.26, 0.50):
        chosen = CacheSlide(selector=KeyDeviation(fraction=fraction), may_decline=False)
        yield Variant(chosen, "key_deviation", fraction)
        plain = CacheSlide.paper(gate=None, fraction=fraction)
        yield Variant(plain, "key_deviation, paper fusion", fraction)
    for gate in _GATES:
        yield Variant(
            CacheSlide.paper(gate=gate), f"key_deviation, paper fusion, {gate} gate", 0.26
        )


def cache_blend() -> Iterator[Variant]:
    for population in (Population.ISOLATED, Population.CONTEXT):
        for fraction in (0.05, 0.10, 0.18, 0.26):
            yield Variant(CacheBlend(fraction, population=population), "key_deviation", fraction)


def epic() -> Iterator[Variant]:
    for population in (Population.ISOLATED, Population.CONTEXT):
        for tokens in BOUNDARIES:
            yield Variant(Epic(tokens, population=population), f"boundary{tokens}", None)


def oracle(backend: Backend, populated: Populated) -> Iterator[Variant]:
    """The tokens that deviate most in truth; different ones for every turn."""
    ranked = deviating_positions(backend, populated)
    for fraction in (0.01, 0.03, 0.05, 0.10, 0.26):
        chosen = Fixed(tuple(ranked[: round(fraction * len(ranked))].tolist()))
        yield Variant(_cacheslide(chosen), "oracle", fraction)


FAMILIES: Mapping[str, Callable[[], Iterator[Variant]]] = {
    "default": default,
    "affinity": affinity,
    "key_cosine": key_cosine,
    "key_deviation": key_deviation,
    "cache_blend": cache_blend,
    "epic": epic,
}


def _cacheslide(selector: Selector) -> CacheSlide:
    """What is measured is the choice of tokens, so nothing is declined."""
    return CacheSlide(selector=selector, may_decline=False)
