"""The points of any study, as they are, for people.

In: a study whose file holds a list of flat points. Out: a rich table or a Markdown table, one line
per point, one column per figure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from cacheslide_agents.bench.points import checked_points
from cacheslide_agents.errors import DataError

_LISTS = ("points", "turns", "rows")
"""Under which names studies keep their points."""


def flat_points(study: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """`DataError` where the file holds no points, or points of several shapes."""
    lists = (study[name] for name in _LISTS if isinstance(study.get(name), list))
    if not (found := next(lists, None)):
        way = "draw it with --plot" if "curves" in study else "read its figures in the file"
        raise DataError(f"study {study.get('study')!r} has no table; {way}")
    points = checked_points(found, words=(), numbers=(), maybe=())
    for number, point in enumerate(points):
        if point.keys() != points[0].keys():
            raise DataError(f"points[{number}] has other figures than points[0]")
    return points


def flat_table(study: Mapping[str, Any]) -> Table:
    points = flat_points(study)
    title = f"{study.get('study', '')}, {study.get('model', '')}"
    table = Table(title=title, box=SIMPLE_HEAD, show_edge=False, padding=0)
    for name, value in points[0].items():
        table.add_column(name, justify="left" if isinstance(value, str) else "right")
    for line in _lines(points):
        table.add_row(*line)
    return table


def flat_markdown(study: Mapping[str, Any]) -> str:
    points = flat_points(study)
    lines = [tuple(points[0]), ("---",) * len(points[0]), *_lines(points)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _lines(points: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    for point in points:
        yield tuple(_cell(value) for value in point.values())


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
