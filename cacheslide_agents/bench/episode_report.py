"""The study of whole episodes, for people.

In: an `episodes` study. Out: a rich table, a Markdown table, or bars in an image file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from cacheslide_agents.bench.points import checked_points
from cacheslide_agents.errors import DataError, install_hint

_COLUMNS = (
    "agent",
    "mode",
    "policy",
    "episodes",
    "calls",
    "wall s",
    "model s",
    "first tokens s",
    "wall x",
    "model x",
    "first tokens x",
    "reused",
    "score",
)
_WORDS = ("agent", "mode", "policy")
_NUMBERS = ("episodes", "calls", "wall_s", "llm_s", "ttft_s", "reused")
_MAYBE = ("wall_speedup", "llm_speedup", "ttft_speedup", "score")


def episode_points(study: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """One for each agent, mode and policy; `DataError` where the file does not hold them."""
    points = study.get("points")
    if study.get("study") != "episodes" or not points:
        raise DataError("this needs a file of `cacheslide bench --study episodes` with points")
    return checked_points(points, words=_WORDS, numbers=_NUMBERS, maybe=_MAYBE)


def episodes_table(study: Mapping[str, Any]) -> Table:
    """Medians over episodes; `x` are paired ratios to `recompute`, larger is faster."""
    points = episode_points(study)
    table = Table(title=f"whole episodes, {study.get('model', '')}", title_justify="left")
    for number, column in enumerate(_COLUMNS):
        table.add_column(column, justify="left" if number < len(_WORDS) else "right")
    for point in points:
        table.add_row(*_cells(point))
    return table


def episodes_markdown(study: Mapping[str, Any]) -> str:
    """The same as a Markdown table."""
    lines = [_COLUMNS, ("---",) * len(_COLUMNS), *map(_cells, episode_points(study))]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def plot_episodes(study: Mapping[str, Any], path: str | Path) -> None:
    """One panel per agent and mode: first tokens, the rest of the model's time, everything else."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise DataError(f"plots need matplotlib; {install_hint('bench')}") from error
    panels: dict[str, list[Mapping[str, Any]]] = {}
    for point in episode_points(study):
        panels.setdefault(f"{point['agent']}, {point['mode']}", []).append(point)
    figure = Figure(figsize=(3.5 * len(panels), 4), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, (title, here) in zip(axes, panels.items(), strict=True):
        names = [point["policy"] for point in here]
        below = [0.0] * len(here)
        for label, heights in _parts(here).items():
            axis.bar(names, heights, bottom=below, label=label)
            below = [low + height for low, height in zip(below, heights, strict=True)]
        axis.set(title=title)
        axis.tick_params(axis="x", rotation=30)
    axes[0].set(ylabel="seconds for an episode (median)")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.savefig(path)


def _parts(points: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    return {
        "first tokens": [point["ttft_s"] for point in points],
        "further tokens": [point["llm_s"] - point["ttft_s"] for point in points],
        "tools and agent": [max(0.0, point["wall_s"] - point["llm_s"]) for point in points],
    }


def _cells(point: Mapping[str, Any]) -> tuple[str, ...]:
    ratios = (point["wall_speedup"], point["llm_speedup"], point["ttft_speedup"])
    score = point["score"]
    return (
        point["agent"],
        point["mode"],
        point["policy"],
        str(point["episodes"]),
        f"{point['calls']:.1f}",
        f"{point['wall_s']:.2f}",
        f"{point['llm_s']:.2f}",
        f"{point['ttft_s']:.2f}",
        *("-" if ratio is None else f"{ratio:.2f}" for ratio in ratios),
        f"{point['reused']:.0%}",
        "-" if score is None else f"{score:.2f}",
    )
