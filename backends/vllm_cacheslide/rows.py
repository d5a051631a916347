"""Which tokens one pass through the layers computes, of one or of several requests.

In: jobs with their rows. Out: batches of bounded size, and in each the runs of consecutive rows
that attention treats as requests of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from cacheslide_agents.chunks import Edit
from cacheslide_agents.policies.base import Plan
from cacheslide_agents.position.profile import CanonicalRows

Rows = npt.NDArray[np.int64]


@dataclass(eq=False)
class Job:
    """One prompt to prefill into `blocks`; rows before `start` are there already.

    `rows`: the positions to compute, ascending; at the end those of the last layer. `edits`: what
    lies between the plan's runs. `rows_per_layer` is empty where all layers run the same rows.
    `trouble` says why what was computed cannot be used; empty while it can. `load_s` may overlap
    with `compute_s`; `wait_s` is the part of it that computing stood still for. `canonical`: rows
    that are computed at their task's usual positions (CCPE).
    """

    engine_id: str
    request_id: str
    plan: Plan
    blocks: tuple[int, ...]
    rows: Rows
    start: int = 0
    edits: tuple[Edit, ...] = ()
    trouble: str = ""
    load_s: float = 0.0
    wait_s: float = 0.0
    compute_s: float = 0.0
    pairs: int = 0
    rows_per_layer: tuple[int, ...] = ()
    canonical: CanonicalRows | None = None

    def fail(self, error: Exception) -> None:
        """The first trouble counts."""
        self.trouble = self.trouble or f"{type(error).__name__}: {error}"

    def give_up(self) -> None:
        """Nothing is loaded or computed for it."""
        self.rows = self.rows[:0]
        self.plan = replace(self.plan, runs=(), narrow=None)


@dataclass(frozen=True)
class Run:
    """Rows [`start`, `stop`) of one job."""

    job: Job
    start: int
    stop: int


@dataclass(frozen=True)
class Batch:
    """`parts`: jobs with the rows of them that this batch computes, in order."""

    parts: tuple[tuple[Job, Rows], ...]
    runs: tuple[Run, ...] = field(init=False)

    def __post_init__(self) -> None:
        runs = [
            Run(job, int(piece[0]), int(piece[-1]) + 1)
            for job, rows in self.parts
            for piece in np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1)
        ]
        object.__setattr__(self, "runs", tuple(runs))

    def __len__(self) -> int:
        return sum(len(rows) for _, rows in self.parts)


def batches(jobs: Sequence[Job], most_rows: int) -> Iterator[Batch]:
    """Rows of all jobs in ascending order of each, at most `most_rows` in a batch."""
    parts: list[tuple[Job, Rows]] = []
    room = most_rows
    for job in jobs:
        rows = job.rows
        while len(rows):
            parts.append((job, rows[:room]))
            rows, room = rows[room:], room - min(room, len(rows))
            if not room:
                yield Batch(tuple(parts))
                parts, room = [], most_rows
    if parts:
        yield Batch(tuple(parts))
