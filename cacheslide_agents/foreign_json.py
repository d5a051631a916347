"""JSON that somebody else wrote.

In: text of any kind, with the place it stands at. Out: its value, or a `DataError` with the place.
Nothing that a file may hold comes out as another exception.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cacheslide_agents.errors import DataError

LARGEST = 1e300
"""Of numbers that are reckoned with: sums and products of a few of them need room."""


def parsed(text: str, where: str, *, wrong: str = "not JSON", finite: bool = False) -> Any:
    """The value that `text` spells; `finite` also refuses numbers that cannot be reckoned with."""
    try:
        return json.loads(text, **_FINITE) if finite else json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: {wrong} ({error})") from error


def json_lines(path: str | Path) -> Iterator[tuple[str, Any]]:
    """Each line that is not blank, read as it is asked for: its place and its value.

    Lines end where the file says so, never at a separator inside a string. `OSError` and
    `UnicodeDecodeError` are left to the caller, who knows what the file was wanted for.
    """
    with open(path, encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                where = f"{path}:{number}"
                yield where, parsed(line, where)


def _number(kind: Callable[[str], float]) -> Callable[[str], float]:
    def read(spelled: str) -> float:
        if not abs(value := kind(spelled)) <= LARGEST:
            raise ValueError(f"{spelled[:20]} is no number to reckon with")
        return value

    return read


_FINITE: dict[str, Any] = {
    "parse_int": _number(int),
    "parse_float": _number(float),
    "parse_constant": _number(float),
}
