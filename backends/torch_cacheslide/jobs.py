"""One worker thread that answers jobs in the order they came, so that results never mix.

In: work to do and where its items go. Out: items one by one, then the end or the error. A consumer
that goes away cancels its job; the work looks at `job.cancelled` between tokens. Idle work runs
only while no job waits, and gives way to one that comes.
"""

from __future__ import annotations

import atexit
import logging
import os
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Hashable
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from threading import Condition, Event, Thread
from time import perf_counter
from typing import Any

from cacheslide_agents.errors import BackendError
from cacheslide_agents.streams import CallOff, End, Sink, apiped, piped, send

log = logging.getLogger(__name__)
Interrupt = Callable[[], None]
"""Called now and then by work that may have to give way: it then raises."""
IdlePiece = Callable[[Interrupt], None]
MOST_IDLE = 64
"""Pieces of idle work that may wait; what comes on top is not taken."""


class Abandoned(Exception):
    """Idle work must end now; it starts again, from its beginning, when nothing else waits."""


@dataclass
class Job:
    """`emit` sends one item to the consumer; `submitted` is on the `perf_counter` clock."""

    work: Callable[[Job], None]
    sink: Sink
    cancelled: Event = field(default_factory=Event)
    submitted: float = field(default_factory=perf_counter)

    def emit(self, item: object) -> None:
        if not send(self.sink, item):
            self.cancelled.set()


class JobQueue:
    """A queue with one worker. `close` makes queued jobs fail with `BackendError`.

    What is not closed is closed when the process exits: a thread that computes while the
    interpreter goes down would abort the process. The worker keeps the queue alive until `end`.
    """

    def __init__(self, name: str) -> None:
        self._jobs: deque[Job] = deque()
        self._pieces: deque[tuple[Hashable, IdlePiece]] = deque()
        self._calls: SimpleQueue[None] = SimpleQueue()  # one for each of them, one for the end
        self._state = Condition()
        self._closed = False
        self._running: Job | None = None
        self._idle: set[Hashable] = set()
        self._counts = {"idle_done": 0, "idle_abandoned": 0, "idle_failed": 0}
        self._owner = os.getpid()
        self._worker = Thread(target=self._serve, name=name, daemon=True)
        self._worker.start()
        atexit.register(self.close)

    @property
    def waiting(self) -> int:
        """Jobs that have not begun."""
        return len(self._jobs)

    def stream(self, work: Callable[[Job], None]) -> Generator[Any, None, None]:
        """Run `work(job)` on the worker; yields what it emits."""
        return piped(partial(self._begin, work))

    def astream(self, work: Callable[[Job], None]) -> AsyncGenerator[Any, None]:
        """The same for asyncio; cancelling the task cancels the job."""
        return apiped(partial(self._begin, work))

    def idle(self, key: Hashable, work: IdlePiece) -> bool:
        """Run `work` when no job waits; false if work of this key waits already, or too much."""
        with self._state:
            if self._closed or key in self._idle or len(self._idle) >= MOST_IDLE:
                return False
            self._idle.add(key)
            self._pieces.append((key, work))
            self._calls.put(None)
        return True

    def settle(self, timeout: float | None = None) -> bool:
        """Wait until no idle work is left; false when `timeout` seconds were not enough."""
        with self._state:
            return self._state.wait_for(lambda: not self._idle, timeout)

    def counts(self) -> dict[str, float]:
        """Idle work waiting, and since the start: done, abandoned for a request, failed."""
        with self._state:
            return {"idle_waiting": float(len(self._idle)), **self._counts}

    def close(self) -> None:
        """As `end`, and wait until the worker is gone."""
        self.end()
        self._worker.join()

    def end(self) -> None:
        """Cancel the running job, fail the queued ones, drop idle work; safe to call twice.

        Waits for nothing, and so may be called while garbage is collected, in whatever thread. A
        forked child has no worker, and perhaps a lock that nobody will release.
        """
        if os.getpid() != self._owner:
            return
        with self._state:
            if self._closed:
                return
            self._closed = True
            if self._running is not None:
                self._running.cancelled.set()
            self._calls.put(None)

    def _begin(self, work: Callable[[Job], None], sink: Sink) -> CallOff:
        job = Job(work, sink)
        with self._state:
            if self._closed:
                raise BackendError("this backend is closed; make a new one")
            if not self._worker.is_alive():
                raise BackendError(
                    "this backend's worker thread is not in this process: threads stay behind when "
                    "a process forks; load the backend in the process that uses it"
                )
            self._jobs.append(job)
            self._calls.put(None)
        return job.cancelled.set

    def _serve(self) -> None:
        """Requests first, then the end, then idle work."""
        while True:
            self._calls.get()
            if self._jobs:
                self._answer(self._jobs.popleft())
            elif self._closed:
                break
            else:
                self._run_idle(*self._pieces.popleft())
        with self._state:
            self._pieces.clear()
            self._idle.clear()
            self._state.notify_all()
        atexit.unregister(self.close)

    def _answer(self, job: Job) -> None:
        with self._state:
            self._running = job
            if self._closed:
                job.cancelled.set()
        job.emit(End(self._run(job)))
        with self._state:
            self._running = None

    def _run(self, job: Job) -> BaseException | None:
        """Do the work. A job cancelled by its consumer has nobody left who reads the error."""
        if job.cancelled.is_set():
            return BackendError("this backend was closed while the request waited")
        try:
            job.work(job)
        except BaseException as caught:  # whatever it is, its consumer waits and the others queue
            return caught
        return None

    def _run_idle(self, key: Hashable, work: IdlePiece) -> None:
        try:
            self._interrupt()
            work(self._interrupt)
            outcome = "done"
        except Abandoned:
            outcome = "abandoned"
        except Exception:  # nobody waits for it
            log.warning("idle work %s failed", key, exc_info=True)
            outcome = "failed"
        with self._state:
            self._counts[f"idle_{outcome}"] += 1
            if outcome == "abandoned" and not self._closed:
                self._pieces.appendleft((key, work))
                self._calls.put(None)
                return
            self._idle.discard(key)
            self._state.notify_all()

    def _interrupt(self) -> None:
        with self._state:
            if self.waiting or self._closed:
                raise Abandoned
