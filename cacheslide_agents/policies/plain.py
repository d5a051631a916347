"""What most policies have in common: plain positions, exact corrections, no say on chunks.

In: nothing. Out: the defaults a policy's dataclass starts from; fields override them.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from cacheslide_agents.chunks import Span
from cacheslide_agents.errors import RequestError
from cacheslide_agents.policies.base import Order, Population, Reuse
from cacheslide_agents.selection.base import LayerSelector, Selector
from cacheslide_agents.selection.fusion import Fusion, Replace
from cacheslide_agents.selection.gate import Gate


class Plain:
    """Base of the policies; see `policies.base.Policy` for what each property means."""

    @property
    def selector(self) -> Selector | LayerSelector | None:
        return None

    @property
    def fusion(self) -> Fusion:
        return Replace()

    @property
    def gate(self) -> Gate | None:
        return None

    @property
    def order(self) -> Order:
        return Order.RELATIVE

    @property
    def may_decline(self) -> bool:
        return False

    @property
    def ccpe(self) -> bool:
        return False

    def positions(self, spans: tuple[Span, ...], length: int) -> npt.NDArray[np.int64]:
        return np.arange(length, dtype=np.int64)

    def reasons(self, spans: tuple[Span, ...]) -> Mapping[str, str]:
        return {}


def check_min_run(policy: str, min_run: int) -> None:
    if min_run < 1:
        raise RequestError(f"{policy}: min_run={min_run!r} must be at least 1")


def reuse_of(population: Population) -> Reuse:
    """Chunks stored alone are taken whole; of a stored request its runs are."""
    if population is Population.NONE:
        raise RequestError("population='none' leaves nothing to reuse; use the policy 'recompute'")
    return Reuse.CHUNKS if population is Population.ISOLATED else Reuse.RUNS
