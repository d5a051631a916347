"""Requests as a command line names them: those of a log, or those of a workload.

In: a log's path, or a task with its data folder. Out: the requests, as often as they are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cacheslide_agents.cli import options
from cacheslide_agents.errors import RequestError

if TYPE_CHECKING:
    from cacheslide_agents.bench.workloads import Limits
    from cacheslide_agents.prompt.logged import LoggedRequest


@dataclass(frozen=True, slots=True)
class Source:
    """A log, or a workload whose turns `seed` chooses. `RequestError` for both and for neither."""

    trace: Path | None
    task: str | None
    data: Path | None
    seed: int

    def __post_init__(self) -> None:
        workload = self.task is not None
        if workload == (self.trace is not None) or workload != (self.data is not None):
            raise RequestError("give either TRACE, or --task with --data")

    def requests(self, limits: Limits, turns: int | None) -> Callable[[], Iterator[LoggedRequest]]:
        """All of the log's, or both prompts of each of the workload's first `turns`; anew at every
        call."""
        from cacheslide_agents.bench.replay import read_trace, turn_requests
        from cacheslide_agents.bench.workloads import load_turns

        if (trace := self.trace) is not None:
            return lambda: read_trace(trace)
        assert self.task is not None and self.data is not None
        found = load_turns(self.task, self.data, limits, limit=turns, seed=self.seed)
        return lambda: turn_requests(found)


def _source(
    trace: Annotated[
        Path | None, typer.Argument(help="JSONL, one request a line; see docs/traces.md.")
    ] = None,
    task: Annotated[str | None, typer.Option(help="Instead of TRACE: a workload.")] = None,
    data: Annotated[Path | None, typer.Option(help="Data folder of the workload.")] = None,
    seed: Annotated[int, typer.Option(help="Chooses the workload's turns, as in `bench`.")] = 0,
) -> Source:
    return Source(trace, task, data, seed)


with_source = options.grouped("source", _source)
"""Gives a command the options that say which requests, as a `Source`."""
