"""The figures of any study, as they are, for people.

In: a study's file, which holds a list of points, or one object for each policy. Out: a rich table
or a Markdown table, one line per point and one column per figure; the other way round where there
are many figures.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from cacheslide_agents.bench.points import checked_points
from cacheslide_agents.errors import DataError

Points = Sequence[Mapping[str, Any]]
_LISTS = ("points", "runs", "turns", "rows")
"""Under which names studies keep their points."""
_WIDE = 10
"""More columns than these do not fit beside each other."""


def flat_points(study: Mapping[str, Any]) -> Points:
    """`DataError` where the file holds no points, or points of several shapes."""
    named = _by_name(study.get("policies") or study)
    lists = [study[name] for name in _LISTS if isinstance(study.get(name), list)]
    if not (found := named or next(iter(lists), [])):
        way = "draw it with --plot" if "curves" in study else "read its figures in the file"
        raise DataError(f"study {study.get('study')!r} has no table; {way}")
    points = checked_points(found, words=(), numbers=(), maybe=())
    for number, point in enumerate(points):
        if point.keys() != points[0].keys():
            raise DataError(f"points[{number}] has other figures than points[0]")
    flat = [dict(_scalars(point)) for point in points]
    columns = dict.fromkeys(chain.from_iterable(flat))
    return [{**columns, **point} for point in flat]


def flat_json(study: Mapping[str, Any]) -> Any:
    """Its points as the table shows them; a study of curves as it stands."""
    return study if "curves" in study else flat_points(study)


def flat_table(study: Mapping[str, Any]) -> Table:
    head, *lines = _grid(flat_points(study))
    title = f"{study.get('study', '')}, {study.get('model', '')}"
    table = Table(title=title, box=SIMPLE_HEAD, show_edge=False, padding=0)
    for name, below in zip(head, lines[0], strict=True):
        table.add_column(name, justify="right" if _is_number(below) else "left")
    for line in lines:
        table.add_row(*line)
    return table


def flat_markdown(study: Mapping[str, Any]) -> str:
    head, *lines = _grid(flat_points(study))
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, ("---",) * len(head), *lines))


def _by_name(objects: Any) -> list[Mapping[str, Any]]:
    """Objects that all hold the same figures, each with its name: one for each policy."""
    found = objects if isinstance(objects, dict) else {}
    named = {name: one for name, one in found.items() if isinstance(one, dict)}
    alike = len(named) > 1 and len({frozenset(one) for one in named.values()}) == 1
    return [{"policy": name, **one} for name, one in named.items()] if alike else []


def _scalars(point: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """An object inside a point gives its figures with its name before theirs."""
    for name, value in point.items():
        if isinstance(value, dict):
            yield from _scalars(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value


def _grid(points: Points) -> list[tuple[str, ...]]:
    lines = [tuple(points[0]), *(tuple(map(_cell, point.values())) for point in points)]
    return list(zip(*lines, strict=True)) if len(lines[0]) > _WIDE else lines


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _is_number(cell: str) -> bool:
    return cell == "-" or cell.lstrip("-")[:1].isdigit()
