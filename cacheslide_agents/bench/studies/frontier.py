"""The frontier: what recomputing more of the reused tokens buys, selector by selector.

In: turns of several tasks, families of policies. Out: `points`, one for each task and variant:
compute fraction, KL to the dense run, and the median TTFT ratio.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cacheslide_agents.backend import Backend
from cacheslide_agents.bench.measure import REFERENCE, Bench
from cacheslide_agents.bench.results import Row
from cacheslide_agents.bench.runner import Progress, silent
from cacheslide_agents.bench.studies.variants import FAMILIES, Variant, oracle
from cacheslide_agents.bench.summary import summarise
from cacheslide_agents.bench.task_data import AGENTS, TaskData
from cacheslide_agents.errors import DataError
from cacheslide_agents.policies import Policy, Prefix, Recompute

ORACLE = "oracle"
ALL_FAMILIES = (*FAMILIES, ORACLE)


@dataclass(frozen=True, slots=True)
class Point:
    """Figures of one variant over the measured turns of one task."""

    task: str
    policy: str
    selector: str
    fraction: float | None
    compute_fraction: float
    kl_mean: float
    kl_p95: float
    top1: float
    ttft_speedup_vs_recompute: float


def run(
    backend: Backend,
    data: Path,
    *,
    save: Callable[[Mapping[str, Any]], None],
    progress: Progress = silent,
    tasks: Sequence[str] = AGENTS,
    families: Sequence[str] = ALL_FAMILIES,
    limit: int = 2,
    seed: int = 0,
    max_prompt_tokens: int = 4096,
) -> dict[str, Any]:
    """Measure `families` on `limit` turns of each task; `save` gets the points after every turn."""
    if unknown := sorted(set(families) - set(ALL_FAMILIES)):
        raise DataError(f"no family named {unknown[0]!r}; known: {', '.join(ALL_FAMILIES)}")
    source = TaskData.of(backend, data, limit=limit, seed=seed, max_prompt_tokens=max_prompt_tokens)
    bench = Bench(backend, source.encode, answer_tokens=0)
    points: dict[str, list[Point]] = {}
    for task in tasks:
        rows: list[Row] = []
        variants: dict[str, Variant] = {}
        turns = source.turns([task])
        for number, turn in enumerate(turns):
            chosen = [one for name in families if name in FAMILIES for one in FAMILIES[name]()]
            stored = {ORACLE: Prefix()} if ORACLE in families else {}
            populated = bench.populate(turn, _policies(chosen) | stored)
            if not points:
                bench.warm_up(populated, _policies([]))
            if ORACLE in families:
                chosen += oracle(backend, populated)
            rows += bench.measure(populated, _policies(chosen), rotate=number)
            variants |= {one.label: one for one in chosen}
            points[task] = _points(task, variants, rows)
            save(_study(backend, points))
            progress(number + 1, len(turns), f"{task}: {turn.id}, turn {turn.turn}")
    return _study(backend, points)


def _policies(variants: Sequence[Variant]) -> dict[str, Policy]:
    return {REFERENCE: Recompute(), **{one.label: one.policy for one in variants}}


def _points(task: str, variants: Mapping[str, Variant], rows: Sequence[Row]) -> list[Point]:
    points = []
    for label, figures in summarise(rows).items():
        speedup = figures.ttft_speedup_vs_recompute
        if label in variants and speedup is not None:
            one = variants[label]
            points.append(
                Point(
                    task=task,
                    policy=one.policy.name,
                    selector=one.selector,
                    fraction=one.fraction,
                    compute_fraction=figures.compute_fraction,
                    kl_mean=figures.kl_mean,
                    kl_p95=figures.kl_p95,
                    top1=figures.top1,
                    ttft_speedup_vs_recompute=speedup.median,
                )
            )
    return points


def _study(backend: Backend, points: Mapping[str, Sequence[Point]]) -> dict[str, Any]:
    return {
        "model": backend.model_id,
        "points": [asdict(point) for task in points.values() for point in task],
    }
