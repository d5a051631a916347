"""CacheSlide: the previous request's caches, moved to where their text now stands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self

from cacheslide_agents.errors import RequestError
from cacheslide_agents.policies.base import Order, Population, Reuse
from cacheslide_agents.policies.plain import Plain, check_min_run
from cacheslide_agents.selection import (
    Affinity,
    AfterRemoval,
    Boundary,
    CkSimGate,
    Fusion,
    Gate,
    KeyDeviation,
    LayerSelector,
    PaperFusion,
    Replace,
    Selector,
    Tail,
    Union,
)

_CORRECTED = Union(Affinity(0.03), Boundary(16), AfterRemoval(64), Tail(64))
_FUSIONS: dict[str, Fusion] = {"paper": PaperFusion(), "replace": Replace()}


@dataclass(frozen=True)
class CacheSlide(Plain):
    """Reuse of in-context caches across shifts (CacheSlide, FAST 2026), as we run it.

    Every run of at least `min_run` tokens that the cached context shares with the prompt is reused
    at its new place. Recomputed are the tokens that speak of what changed (`Affinity`), those that
    follow a change (`Boundary`, and more of them `AfterRemoval`) and the last ones before the
    answer (`Tail`); their new keys and values replace the cached ones. With `may_decline` plain
    prefix reuse is taken where it is cheaper. `order=Order.ANY` also reuses whole chunks that
    changed places. With `ccpe`, a CoPE model first computes the chunks of a task whose profile its
    backend has at their canonical positions. Departs from the paper in the choice of tokens, which
    needs no forward pass, in the fusion and in having no gate; `CacheSlide.paper()` is the paper's
    own rule. Why: docs/decisions.md.
    """

    selector: Selector | LayerSelector | None = _CORRECTED
    fusion: Fusion = _FUSIONS["replace"]
    gate: Gate | None = None
    min_run: int = 16
    order: Order = Order.RELATIVE
    may_decline: bool = True
    name: str = "cacheslide"
    population: Population = Population.CONTEXT
    reuse: Reuse = Reuse.RUNS
    ccpe: bool = True

    def __post_init__(self) -> None:
        check_min_run(self.name, self.min_run)

    @classmethod
    def paper(
        cls,
        fusion: Literal["paper", "replace"] = "paper",
        gate: Literal["literal", "converged"] | None = "literal",
        *,
        fraction: float = 0.26,
        tau: float = 0.12,
    ) -> Self:
        """Weighted Correction Attention as printed (Algorithm 2), without declining.

        The `fraction` of reused tokens with the largest key deviation is corrected; new and cached
        values are fused by the deviation's weight; every 4 layers the gate lets tokens go and takes
        in the next ranked. Departures, all where the text leaves no other choice on a stock model:

        - the deviation is read at layer 1 counted from 0: position-free keys of layer 0 do not
          depend on the context at all;
        - keys of RoPE models are brought to their new place by rotation; CCPE needs a CoPE model
          and a profile of the task (`position/profile.py` says how it departs);
        - what is reused comes from aligning tokens (runs of at least 16), not declared segments;
        - corrected tokens attend to the whole prompt before them; no association mask limits them;
        - the fusion weight is not clamped, so beyond 1 it extrapolates;
        - `gate="converged"` is the gate as the prose means it; `None` switches it off;
        - ties go to the lower position, and deviations of rounding size are not eligible.
        """
        if fusion not in _FUSIONS:
            raise RequestError(f"fusion={fusion!r} must be 'paper' or 'replace'")
        return cls(
            selector=KeyDeviation(layer=1, fraction=fraction),
            fusion=_FUSIONS[fusion],
            gate=None if gate is None else CkSimGate(reading=gate, tau=tau, every=4),
            may_decline=False,
            name="cacheslide_paper",
        )
