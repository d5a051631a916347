"""What the predictions add up to, and how far they are from what was measured.

In: predictions, a fitted cost model, rows of a benchmark. Out: totals and errors by policy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from cacheslide_agents.bench.replay.predict import Prediction
from cacheslide_agents.bench.replay.trace import turn_name
from cacheslide_agents.bench.results import Row
from cacheslide_agents.bench.summary import HITS
from cacheslide_agents.errors import DataError
from cacheslide_agents.policies.cost import CostModel
from cacheslide_agents.policies.work import Work


@dataclass(frozen=True, slots=True)
class Totals:
    """One policy over all requests. `hit_rate`: reused / prompt tokens. `work_vs_recompute`: priced
    work as a share of that of dense prefill. `ttft_s`: seconds summed, `None` without a basis.
    """

    requests: int
    hits: int
    declined: int
    fallbacks: int
    prompt_tokens: int
    reused_tokens: int
    active_tokens: int
    hit_rate: float
    compute_fraction: float
    bytes_reused: int
    bytes_stored: int
    work_vs_recompute: float
    ttft_s: float | None


@dataclass(frozen=True, slots=True)
class Errors:
    """Predictions of one policy against measured rows of the same name.

    `reused`, `active`: relative error of the sums; `worst_active`: of the worst row.
    `ttft`: of the summed seconds, `ttft_median`: median over rows; `None` without a basis.
    """

    rows: int
    reused: float
    active: float
    worst_active: float
    ttft: float | None
    ttft_median: float | None


def dense_work(prediction: Prediction, layers: int) -> Work:
    """The work of computing the same prompt in full."""
    tokens = prediction.prompt_tokens
    return Work(float(tokens * layers), tokens * (tokens + 1) / 2 * layers)


def totals(predictions: Sequence[Prediction], cost: CostModel, *, timed: bool) -> dict[str, Totals]:
    """By policy, in order of first appearance. `timed`: the cost model has a basis."""
    names = dict.fromkeys(one.policy for one in predictions)
    return {
        name: _totals([one for one in predictions if one.policy == name], cost, timed)
        for name in names
    }


def _totals(mine: Sequence[Prediction], cost: CostModel, timed: bool) -> Totals:
    seconds = sum(cost.predict(one.work) for one in mine)
    dense = sum(cost.predict(dense_work(one, cost.layers)) for one in mine)
    prompt, reused, active = (
        sum(getattr(one, name) for one in mine)
        for name in ("prompt_tokens", "reused_tokens", "active_tokens")
    )
    return Totals(
        requests=len(mine),
        hits=sum(one.outcome in HITS for one in mine),
        declined=sum(one.outcome == "declined" for one in mine),
        fallbacks=sum(one.outcome == "fallback" for one in mine),
        prompt_tokens=prompt,
        reused_tokens=reused,
        active_tokens=active,
        hit_rate=reused / prompt,
        compute_fraction=fmean(one.compute_fraction for one in mine),
        bytes_reused=sum(one.bytes_reused for one in mine),
        bytes_stored=sum(one.bytes_stored for one in mine),
        work_vs_recompute=seconds / dense,
        ttft_s=seconds if timed else None,
    )


def errors(
    predictions: Iterable[Prediction], rows: Iterable[Row], cost: CostModel, *, timed: bool
) -> dict[str, Errors]:
    """By policy, over the rows that both sides have; `DataError` if there is none."""
    measured = {(turn_name(row.id, row.turn), row.policy): row for row in rows}
    pairs: dict[str, list[tuple[Prediction, Row]]] = {}
    for one in predictions:
        if (row := measured.get((one.id, one.policy))) is not None:
            pairs.setdefault(one.policy, []).append((one, row))
    if not pairs:
        raise DataError("the measured run and this replay have no row and policy in common")
    return {name: _errors(each, cost, timed) for name, each in pairs.items()}


def _errors(pairs: Sequence[tuple[Prediction, Row]], cost: CostModel, timed: bool) -> Errors:
    seconds = [(cost.predict(one.work), row.ttft_s) for one, row in pairs]
    active = [(one.active_tokens, row.active_tokens) for one, row in pairs]
    return Errors(
        rows=len(pairs),
        reused=_of_sums([(one.reused_tokens, row.reused_tokens) for one, row in pairs]),
        active=_of_sums(active),
        worst_active=max(_relative(*each) for each in active),
        ttft=_of_sums(seconds) if timed else None,
        ttft_median=median(_relative(*each) for each in seconds) if timed else None,
    )


def _of_sums(pairs: Sequence[tuple[float, float]]) -> float:
    return _relative(sum(a for a, _ in pairs), sum(b for _, b in pairs))


def _relative(predicted: float, measured: float) -> float:
    """|predicted - measured| / measured; of nothing measured, whether anything was predicted."""
    if not measured:
        return float(predicted != 0)
    return abs(predicted - measured) / measured
