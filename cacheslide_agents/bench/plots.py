"""Draws the frontier: what a policy costs in compute against what it costs in quality.

In: a `frontier` study. Out: an image file; its suffix chooses the format. Needs matplotlib.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cacheslide_agents.bench.points import checked_points
from cacheslide_agents.errors import DataError, install_hint

_LEAST_KL = 1e-7
"""A logarithmic axis has no zero."""
_DEFAULT = "cacheslide default"
"""What users get stands out."""


def plot_frontier(study: Mapping[str, Any], path: str | Path) -> None:
    """One panel per task, one line per selector; KL is logarithmic, lower left is better."""
    given = study.get("points")
    if not given:
        raise DataError("a frontier plot needs a study with 'points'; this file has none")
    points = checked_points(
        given,
        words=("task", "policy", "selector"),
        numbers=("compute_fraction", "kl_mean"),
        maybe=("fraction",),
    )
    try:
        from matplotlib import colormaps
        from matplotlib.figure import Figure
    except ImportError as error:
        raise DataError(f"plots need matplotlib; {install_hint('bench')}") from error
    by_task = _grouped(points, "task")
    labels = list(_lines(points))
    figure = Figure(figsize=(6 * len(by_task), 7), layout="constrained")
    panels = figure.subplots(1, len(by_task), squeeze=False)[0]
    drawn = {}
    for panel, (task, here) in zip(panels, by_task.items(), strict=True):
        for label, line in _lines(here).items():
            x, y = zip(*sorted(line), strict=True)
            color = "black" if label == _DEFAULT else colormaps["tab20"](labels.index(label) % 20)
            (drawn[label],) = panel.plot(
                x, y, marker="o", color=color, zorder=3 if label == _DEFAULT else 2
            )
        panel.set(title=task, xlabel="compute fraction", ylabel="mean KL to dense", yscale="log")
    figure.legend(list(drawn.values()), list(drawn), loc="outside lower center", ncols=3)
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
