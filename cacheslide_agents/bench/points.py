"""The points of a study, as its file holds them.

In: whatever a file has under `points`. Out: the same, once every point has the columns a report
needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cacheslide_agents.errors import DataError


def checked_points(
    points: Any, *, words: Sequence[str], numbers: Sequence[str], maybe: Sequence[str]
) -> list[Mapping[str, Any]]:
    """`points`, each an object with text under `words` and numbers under `numbers`.

    Under `maybe` stands a number or null. `DataError` names the first point that is not so.
    """
    if not isinstance(points, list):
        raise DataError(f"'points' is a {type(points).__name__}; it must be a list")
    for number, point in enumerate(points):
        if not isinstance(point, dict):
            raise DataError(f"points[{number}] is a {type(point).__name__}; it must be an object")
        kinds = (words, str), (numbers, (int, float)), (maybe, (int, float, type(None)))
        for columns, kind in kinds:
            for name in columns:
                if name not in point or not isinstance(point[name], kind):
                    raise DataError(f"points[{number}] has no {name!r} of the right kind")
    return points
