"""Draws a study of curves.

In: a study with `curves: {name: [[x, y], ...]}`, and `x` and `y`, what its axes show. Out: an image
file; its suffix chooses the format. Needs matplotlib.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cacheslide_agents.errors import DataError, install_hint


def plot_curves(study: Mapping[str, Any], path: str | Path) -> None:
    """All curves in one panel; what is called KL stands on a logarithmic axis."""
    curves = _checked(study.get("curves"))
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise DataError(f"plots need matplotlib; {install_hint('bench')}") from error
    figure = Figure(figsize=(7, 5), layout="constrained")
    panel = figure.subplots()
    for name, points in curves.items():
        panel.plot(*zip(*sorted(points), strict=True), marker="o", label=name)
    label = str(study.get("y", ""))
    scale = "log" if "KL" in label and all(y > 0 for c in curves.values() for _, y in c) else None
    panel.set(title=study.get("study"), xlabel=study.get("x", ""), ylabel=label)
    panel.set_yscale(scale or "linear")
    figure.legend(loc="outside lower center", ncols=2)
    figure.savefig(path)


def _checked(curves: Any) -> dict[str, list[tuple[float, float]]]:
    """`DataError` unless every curve is a list of pairs of numbers."""
    if not isinstance(curves, dict) or not curves:
        raise DataError("this needs a study with 'curves'; the file has none")
    for name, points in curves.items():
        if not isinstance(points, list) or not points or not all(map(_is_point, points)):
            raise DataError(f"curve {name!r} must be a list of [x, y]")
    return curves


def _is_point(point: Any) -> bool:
    return (
        isinstance(point, list)
        and len(point) == 2
        and all(isinstance(each, (int, float)) for each in point)
    )
