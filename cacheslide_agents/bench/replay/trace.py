"""Where replayed requests come from: a log, or the turns of a workload.

In: a JSONL file (see `prompt/logged.py` for its lines), or turns. Out: `LoggedRequest`s in order.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from cacheslide_agents.bench.workloads import Turn
from cacheslide_agents.errors import DataError
from cacheslide_agents.prompt.logged import LoggedRequest, read_request


def read_trace(path: str | Path) -> Iterator[LoggedRequest]:
    """One request a line, read as it is asked for; `DataError` names the line that is wrong."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            empty = True
            for number, line in enumerate(file, start=1):
                if line.strip():
                    empty = False
                    yield _request(line, f"{path}:{number}")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: the trace cannot be read: {error}") from error
    if empty:
        raise DataError(f"{path} holds no requests")


def turn_requests(turns: Iterable[Turn]) -> Iterator[LoggedRequest]:
    """Each turn as the benchmark runs it: t-1 cached in a namespace of its own, then t measured."""
    for turn in turns:
        name = turn_name(turn.id, turn.turn)
        yield LoggedRequest(f"{name} (t-1)", name, turn.populate, namespace=name, measured=False)
        yield LoggedRequest(name, name, turn.measure, namespace=name, retain=False)


def turn_name(row: str, turn: int) -> str:
    return f"{row}, turn {turn}"


def _request(line: str, where: str) -> LoggedRequest:
    try:
        return read_request(json.loads(line), where)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not JSON ({error})") from error
