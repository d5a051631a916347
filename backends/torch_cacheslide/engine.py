"""One worker thread that answers jobs in the order they came, so that results never mix.

In: work to do and where its items go. Out: items one by one, then the end or the error. A consumer
that goes away cancels its job; the work looks at `job.cancelled` between tokens. Idle work runs
only while no job waits, and gives way to one that comes.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
from collections.abc import AsyncGenerator, Callable, Hashable, Iterator
from dataclasses import dataclass, field
from itertools import count
from queue import PriorityQueue, SimpleQueue
from threading import Condition, Event, Thread
from time import perf_counter
from typing import Any

from cacheslide_agents.errors import BackendError

log = logging.getLogger(__name__)
Sink = Callable[[Any], None]
Interrupt = Callable[[], None]
IdleWork = Callable[[Interrupt], None]
"""Calls what it is given now and then: that raises `Abandoned` when a request has come."""
MOST_IDLE = 64
"""Pieces of idle work that may wait; what comes on top is not taken."""
_REQUEST, _END, _IDLE = range(3)


class Abandoned(Exception):
    """Idle work must end now; it starts again, from its beginning, when nothing else waits."""


@dataclass(frozen=True)
class _End:
    error: BaseException | None = None


@dataclass
class Job:
    """`emit` sends one item to the consumer; `submitted` is on the `perf_counter` clock."""

    work: Callable[[Job], None]
    sink: Sink
    cancelled: Event = field(default_factory=Event)
    submitted: float = field(default_factory=perf_counter)

    def emit(self, item: object) -> None:
        try:
            self.sink(item)
        except RuntimeError:  # the consumer's event loop is gone
            self.cancelled.set()


@dataclass(order=True, frozen=True)
class _Entry:
    """The queue's order: requests first, then the end of the worker, then idle work."""

    priority: int
    number: int
    job: Job | None = field(default=None, compare=False)
    idle: tuple[Hashable, IdleWork] | None = field(default=None, compare=False)


class Engine:
    """A queue with one worker. `close` makes queued jobs fail with `BackendError`.

    What is not closed is closed when the process exits: a thread that computes while the
    interpreter goes down would abort the process.
    """

    def __init__(self, name: str) -> None:
        self._entries: PriorityQueue[_Entry] = PriorityQueue()
        self._numbers = count()
        self._state = Condition()
        self._closed = False
        self._waiting = 0
        self._running: Job | None = None
        self._idle: set[Hashable] = set()
        self._counts = {"idle_done": 0, "idle_abandoned": 0, "idle_failed": 0}
        self._worker = Thread(target=self._serve, name=name, daemon=True)
        self._worker.start()
        atexit.register(self._close_at_exit, os.getpid())

    def stream(self, work: Callable[[Job], None]) -> Iterator[Any]:
        """Run `work(job)` on the worker; yields what it emits."""
        items: SimpleQueue[Any] = SimpleQueue()
        job = self._submit(Job(work, items.put))
        try:
            while not isinstance(item := items.get(), _End):
                yield item
            if item.error is not None:
                raise item.error
        finally:
            job.cancelled.set()

    async def astream(self, work: Callable[[Job], None]) -> AsyncGenerator[Any, None]:
        """The same for asyncio; cancelling the task cancels the job."""
        loop = asyncio.get_running_loop()
        items: asyncio.Queue[Any] = asyncio.Queue()

        def sink(item: object) -> None:
            loop.call_soon_threadsafe(items.put_nowait, item)

        job = self._submit(Job(work, sink))
        try:
            while not isinstance(item := await items.get(), _End):
                yield item
            if item.error is not None:
                raise item.error
        finally:
            job.cancelled.set()

    def idle(self, key: Hashable, work: IdleWork) -> bool:
        """Run `work` when no job waits; false if work of this key waits already, or too much."""
        with self._state:
            if self._closed or key in self._idle or len(self._idle) >= MOST_IDLE:
                return False
            self._idle.add(key)
            self._entries.put(_Entry(_IDLE, next(self._numbers), idle=(key, work)))
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
        """Cancel the running job, fail the queued ones, drop idle work; safe to call twice."""
        with self._state:
            if self._closed:
                return
            self._closed = True
            if self._running is not None:
                self._running.cancelled.set()
            self._entries.put(_Entry(_END, next(self._numbers)))
        self._worker.join()
        atexit.unregister(self._close_at_exit)

    def _close_at_exit(self, owner: int) -> None:
        """A forked child has no worker, and perhaps a lock that nobody will release."""
        if os.getpid() == owner:
            self.close()

    def _submit(self, job: Job) -> Job:
        with self._state:
            if self._closed:
                raise BackendError("this backend is closed; make a new one")
            if not self._worker.is_alive():
                raise BackendError(
                    "this backend's worker thread is not in this process: threads stay behind when "
                    "a process forks; load the backend in the process that uses it"
                )
            self._waiting += 1
            self._entries.put(_Entry(_REQUEST, next(self._numbers), job))
        return job

    def _serve(self) -> None:
        while True:
            entry = self._entries.get()
            if entry.job is not None:
                self._answer(entry.job)
            elif entry.idle is not None:
                self._run_idle(entry, *entry.idle)
            else:
                break
            del entry  # while it waits, the worker keeps no request and no model alive
        with self._state:
            self._idle.clear()
            self._state.notify_all()

    def _answer(self, job: Job) -> None:
        with self._state:
            self._waiting -= 1
            self._running = job
            if self._closed:
                job.cancelled.set()
        job.emit(_End(self._run(job)))
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

    def _run_idle(self, entry: _Entry, key: Hashable, work: IdleWork) -> None:
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
                self._entries.put(entry)
                return
            self._idle.discard(key)
            self._state.notify_all()

    def _interrupt(self) -> None:
        with self._state:
            if self._waiting or self._closed:
                raise Abandoned
