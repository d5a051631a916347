"""From rows to the headline: paired ratios over all rows, and what they cost in quality.

In: the rows of one run. Out: one `PolicySummary` per policy, in order of first appearance.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median

import numpy as np

from cacheslide_agents.bench.results import PolicySummary, Row, Spread

HITS = frozenset({"hit", "partial"})


def summarise(rows: Sequence[Row]) -> dict[str, PolicySummary]:
    """Summaries by policy name. Ratios pair a row with the same turn under another policy.

    A fallback or a declined row counts with its own time; a fallback counts nothing as reused.
    """
    times = {(row.id, row.turn, row.policy): row.ttft_s for row in rows}
    names = dict.fromkeys(row.policy for row in rows)
    return {name: _policy([r for r in rows if r.policy == name], times) for name in names}


def _policy(rows: Sequence[Row], times: Mapping[tuple[str, int, str], float]) -> PolicySummary:
    hits = [row for row in rows if row.outcome in HITS]
    reused = sum(row.reused_tokens for row in rows if row.outcome != "fallback")
    return PolicySummary(
        ttft_speedup_vs_recompute=_speedup(rows, "recompute", times),
        ttft_speedup_vs_prefix=_speedup(rows, "prefix", times),
        ttft_speedup_hits_only=_speedup(hits, "recompute", times),
        compute_fraction=fmean(row.compute_fraction for row in rows),
        kl_mean=fmean(row.kl for row in rows),
        kl_p95=float(np.percentile([row.kl for row in rows], 95)),
        top1=fmean(row.top1 for row in rows),
        f1=_mean(row.f1 for row in rows),
        em=_mean(row.em for row in rows),
        hit_rate=reused / sum(row.prompt_tokens for row in rows),
        rows_hit=len(hits),
        fallbacks=sum(row.outcome == "fallback" for row in rows),
        declined=sum(row.outcome == "declined" for row in rows),
    )


def _speedup(
    rows: Sequence[Row], against: str, times: Mapping[tuple[str, int, str], float]
) -> Spread | None:
    ratios = [
        times[row.id, row.turn, against] / row.ttft_s
        for row in rows
        if (row.id, row.turn, against) in times
    ]
    return Spread(median(ratios), min(ratios), max(ratios)) if ratios else None


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
