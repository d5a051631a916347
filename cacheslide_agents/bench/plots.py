"""Draws the frontier: what a policy costs in compute against what it costs in quality.

In: a `frontier` study. Out: an image file; its suffix chooses the format. Needs matplotlib.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cacheslide_agents.errors import DataError

_LEAST_KL = 1e-7
"""A logarithmic axis has no zero."""


def plot_frontier(study: Mapping[str, Any], path: str | Path) -> None:
    """One panel per task, one line per selector; KL is logarithmic, lower left is better."""
    points = study.get("points")
    if not points:
        raise DataError("a frontier plot needs a study with 'points'; this file has none")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise DataError("plots need matplotlib; pip install 'cacheslide-agents[bench]'") from error
    by_task = _grouped(points, "task")
    figure = Figure(figsize=(6 * len(by_task), 5), layout="constrained")
    panels = figure.subplots(1, len(by_task), squeeze=False)[0]
    for panel, (task, here) in zip(panels, by_task.items(), strict=True):
        for label, line in _lines(here).items():
            line = sorted(line)
            panel.plot([x for x, _ in line], [y for _, y in line], marker="o", label=label)
        panel.set(title=task, xlabel="compute fraction", ylabel="mean KL to dense", yscale="log")
        panel.legend(fontsize="x-small")
    figure.savefig(path)


def _lines(points: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    lines: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for point in points:
        policy, selector = point["policy"], point["selector"]
        label = policy if point["fraction"] is None else f"{policy} {selector}"
        lines[label].append((point["compute_fraction"], max(point["kl_mean"], _LEAST_KL)))
    return lines


def _grouped(points: Sequence[Mapping[str, Any]], key: str) -> dict[str, list[Mapping[str, Any]]]:
    groups: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for point in points:
        groups[point[key]].append(point)
    return groups
