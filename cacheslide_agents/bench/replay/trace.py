"""The turns of a workload as requests to replay.

In: turns. Out: `LoggedRequest`s in order, two a turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from cacheslide_agents.bench.workloads import Turn
from cacheslide_agents.prompt.logged import LoggedRequest


def turn_requests(turns: Iterable[Turn]) -> Iterator[LoggedRequest]:
    """Each turn as the benchmark runs it: t-1 cached in a namespace of its own, then t measured."""
    for turn in turns:
        name = turn_name(turn.id, turn.turn)
        yield LoggedRequest(f"{name} (t-1)", name, turn.populate, namespace=name, measured=False)
        yield LoggedRequest(name, name, turn.measure, namespace=name, retain=False)


def turn_name(row: str, turn: int) -> str:
    return f"{row}, turn {turn}"
