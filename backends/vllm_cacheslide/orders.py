"""What the scheduler's side tells the worker's side in a step, and what comes back.

The scheduler plans, because a plan needs tokens only and must be the same on every rank; it names
stored contexts by number. The worker holds keys and values. Orders are carried out in the order
they were given, so a plan may use a context that an earlier order has yet to store.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from cacheslide_agents.chunks import Edit
from cacheslide_agents.pages.base import StoredContext
from cacheslide_agents.policies.base import Plan
from cacheslide_agents.policies.work import Work
from cacheslide_agents.position.profile import CanonicalRows


@dataclass(frozen=True, eq=False)
class Order:
    """A request's plan. `sources` are the numbers of the contexts its runs come from, run by run.

    `engine_id` is vLLM's name of the request, `request_id` its client's. A `sibling` is another
    answer to a prompt whose receipt is written already.
    """

    engine_id: str
    request_id: str
    plan: Plan
    sources: tuple[int, ...]
    plan_s: float = 0.0
    sibling: bool = False


@dataclass(frozen=True, eq=False)
class Prefill:
    """Fill `blocks` (ids, in order) with prompt tokens [`start`, n - 1); vLLM does the last one.

    `edits`: what lies between the plan's runs, where a `narrow` selector needs to know.
    `canonical`: rows to compute at their task's usual positions (CCPE).
    """

    order: Order
    blocks: tuple[int, ...]
    start: int
    edits: tuple[Edit, ...] = ()
    canonical: CanonicalRows | None = None


@dataclass(frozen=True, eq=False)
class Note:
    """vLLM prefills this one itself, from token `start` on; only its receipt is ours."""

    order: Order
    start: int


@dataclass(frozen=True, eq=False)
class Keep:
    """Store the keys and values in `blocks` as context `number`; then they may be freed."""

    order: Order
    number: int
    context: StoredContext
    blocks: tuple[int, ...]


@dataclass
class StepOrders(KVConnectorMetadata):
    """One step's orders; `ended` are requests that nothing more will be ordered for.

    `unfilled`: blocks that were promised, but no order fills them; vLLM has to be told. `restored`,
    in an engine's first step: numbers of contexts that every rank's store has had from before, by
    their names (`restoring`).
    """

    keeps: tuple[Keep, ...] = ()
    prefills: tuple[Prefill, ...] = ()
    notes: tuple[Note, ...] = ()
    ended: tuple[str, ...] = ()
    unfilled: frozenset[int] = frozenset()
    restored: Mapping[str, int] | None = None

    @property
    def blocks(self) -> set[int]:
        """The blocks that prefills fill."""
        return {block for prefill in self.prefills for block in prefill.blocks}


@dataclass(frozen=True)
class StepResults(KVConnectorWorkerMetadata):
    """`lost`: contexts the store no longer has. `observed`: work and the seconds it took.

    `off` says why the worker cannot reuse at all; empty when it can.
    """

    lost: frozenset[int] = frozenset()
    observed: tuple[tuple[Work, float], ...] = ()
    off: str = ""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepResults:
        """A context one rank has lost is of no use to the others."""
        assert isinstance(other, StepResults)
        return replace(self, lost=self.lost | other.lost, off=self.off or other.off)
