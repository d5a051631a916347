"""The study of answers, for people.

In: an `answers` study. Out: a rich table or a Markdown table, one line per task and score.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from cacheslide_agents.bench.points import checked_points
from cacheslide_agents.bench.studies.answers import OUTCOMES
from cacheslide_agents.bench.studies.scored import METRICS
from cacheslide_agents.errors import DataError

_COLUMNS = ("task", "n", "score", "dense", "reuse", "difference", "95 %", "changed", "outcomes")
_SCORES = ("dense", "reuse", "difference", "low", "high")
_NUMBERS = (
    *("questions", "n", "changed", "compute_fraction"),
    *(f"{metric}_{name}" for metric in METRICS for name in _SCORES),
    *OUTCOMES,
)


def answer_points(study: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """One for each task; `DataError` where the file does not hold them."""
    points = study.get("points")
    if study.get("study") != "answers" or not points:
        raise DataError("this needs a file of `cacheslide bench --study answers` with points")
    return checked_points(points, words=("task",), numbers=_NUMBERS, maybe=())


def answers_table(study: Mapping[str, Any]) -> Table:
    """Differences are reuse - dense over all rows; `changed` is the share of other texts."""
    title = f"answers on reused context, {study.get('model', '')}"
    table = Table(title=title, box=SIMPLE_HEAD, show_edge=False, padding=0)
    for column in _COLUMNS:
        table.add_column(column, justify="right" if column in _COLUMNS[3:8] else "left")
    for cells in _lines(study):
        table.add_row(*cells)
    return table


def answers_markdown(study: Mapping[str, Any]) -> str:
    """The same as a Markdown table."""
    lines = [_COLUMNS, ("---",) * len(_COLUMNS), *_lines(study)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _lines(study: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for point in answer_points(study):
        for metric in METRICS:
            dense, reuse, difference, low, high = (point[f"{metric}_{name}"] for name in _SCORES)
            yield (
                point["task"],
                f"{point['n']}/{point['questions']}",
                metric.upper(),
                f"{dense:.3f}",
                f"{reuse:.3f}",
                f"{difference:+.3f}",
                f"{low:+.3f} to {high:+.3f}",
                f"{point['changed']:.1%}",
                ", ".join(f"{point[name]} {name}" for name in OUTCOMES if point[name]),
            )
