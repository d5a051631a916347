"""What happened to one request, told from its plan and from what the executor counted.

In: a `Plan`, the rows still in flight at the last layer, rows per layer, times. Out: a `Receipt`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from cacheslide_agents.backend import ChunkOutcome, ChunkState, Receipt
from cacheslide_agents.chunks import Span
from cacheslide_agents.policies.base import Plan
from cacheslide_agents.policies.outcomes import outcome_of
from cacheslide_agents.prompt.masks import running_total

PREFIX_CACHE = "prefix_cache"
"""Reason of a request of which the engine's own prefix cache had more than the plan."""


def build_receipt(
    plan: Plan,
    *,
    request_id: str,
    active: npt.NDArray[np.int64],
    rows_per_layer: Sequence[int],
    plan_s: float = 0.0,
    load_s: float = 0.0,
    compute_s: float = 0.0,
    wait_s: float = 0.0,
    peak_kv_bytes: int = 0,
    prefix: int = 0,
) -> Receipt:
    """`active`: prompt indices computed at the last layer. `rows_per_layer`: rows each layer ran.

    Tokens are counted at the last layer: reused ones were taken from the store and not computed
    there. The compute fraction counts all layers, and what a selector's probe ran. Time spent in a
    queue and until the first token is known to the backend alone, later. `prefix`: first tokens of
    the prompt that the engine's own prefix cache had; they are reused, whatever the plan says.
    """
    computed = np.zeros(len(plan.ids), dtype=np.bool_)
    computed[active] = True
    hit = plan.hit | (np.arange(len(plan.ids)) < prefix)
    reused = hit & ~computed
    outcome, reason = plan.outcome, plan.reason
    if outcome == "cold" and hit.any():
        outcome, reason = outcome_of(hit, plan.spans), PREFIX_CACHE
    work = sum(rows_per_layer) + plan.probe_layer_tokens
    return Receipt(
        request_id=request_id,
        policy=plan.policy.name,
        outcome=outcome,
        reason=reason,
        prompt_tokens=len(plan.ids),
        reused_tokens=int(reused.sum()),
        active_tokens=int(computed.sum()),
        compute_fraction=work / (len(plan.ids) * len(rows_per_layer)),
        exact=bool(plan.exact.all()),
        plan_s=plan_s,
        load_s=load_s,
        compute_s=compute_s,
        wait_s=wait_s,
        peak_kv_bytes=peak_kv_bytes,
        chunks=(*_chunks(plan, hit, reused), *plan.vanished),
    )


def _chunks(
    plan: Plan, hit: npt.NDArray[np.bool_], reused: npt.NDArray[np.bool_]
) -> list[ChunkOutcome]:
    taken, kept = running_total(hit), running_total(reused)
    starts = np.array([planned.run.start for planned in plan.runs], dtype=np.int64)
    outcomes = []
    for span in plan.spans:
        hits = int(taken[span.stop] - taken[span.start])
        still = int(kept[span.stop] - kept[span.start])
        state = _state(span, hits, len(plan.ids))
        outcomes.append(
            ChunkOutcome(
                id=span.id,
                role=span.role,
                tokens=len(span),
                outcome=state,
                shift=_shift(plan, span, starts) if hits else None,
                reused=still,
                corrected=hits - still,
                reason="" if state == "hit" else plan.chunk_reasons.get(span.id, ""),
            )
        )
    return outcomes


def _state(span: Span, hits: int, length: int) -> ChunkState:
    """The last prompt token is of no account: it is computed whatever is stored."""
    if not hits:
        return "update"
    return "hit" if hits == len(span) - (span.stop == length) else "aligned"


def _shift(plan: Plan, span: Span, starts: npt.NDArray[np.int64]) -> int:
    """Shift of the first run that reaches into `span`; what no run does has not moved."""
    before = max(0, int(np.searchsorted(starts, span.start, side="right")) - 1)
    for planned in plan.runs[before:]:
        if planned.run.stop > span.start:
            return planned.run.shift if planned.run.start < span.stop else 0
    return 0
