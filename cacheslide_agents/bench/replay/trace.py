"""Where replayed requests come from: a log, or the turns of a workload.

In: a JSONL file (see `prompt/logged.py` for its lines), or turns. Out: `LoggedRequest`s in order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from cacheslide_agents.bench.workloads import Turn
from cacheslide_agents.errors import DataError
from cacheslide_agents.foreign_json import json_lines
from cacheslide_agents.prompt.logged import LoggedRequest, read_request


def read_trace(path: str | Path) -> Iterator[LoggedRequest]:
    """One request a line, read as it is asked for; `DataError` names the line that is wrong."""
    try:
        empty = True
        for where, record in json_lines(path):
            empty = False
            yield read_request(record, where)
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
