"""One worker thread that answers jobs in the order they came, so that results never mix.

In: work to do and where its items go. Out: items one by one, then the end or the error. A consumer
that goes away cancels its job; the work looks at `job.cancelled` between tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Event, Lock, Thread
from time import perf_counter
from typing import Any

from cacheslide_agents.errors import BackendError

Sink = Callable[[Any], None]


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


class Engine:
    """A queue with one worker. `close` makes queued jobs fail with `BackendError`."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._lock = Lock()
        self._closed = False
        self._running: Job | None = None
        self._worker = Thread(target=self._serve, name=name, daemon=True)
        self._worker.start()

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

    async def astream(self, work: Callable[[Job], None]) -> AsyncIterator[Any]:
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

    def close(self) -> None:
        """Cancel the running job, fail the queued ones; safe to call twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._running is not None:
                self._running.cancelled.set()
        self._jobs.put(None)
        self._worker.join()

    def _submit(self, job: Job) -> Job:
        with self._lock:
            if self._closed:
                raise BackendError("this backend is closed; make a new one")
            if not self._worker.is_alive():
                raise BackendError(
                    "this backend's worker thread is not in this process: threads stay behind when "
                    "a process forks; load the backend in the process that uses it"
                )
            self._jobs.put(job)
        return job

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            with self._lock:
                self._running = job
                if self._closed:
                    job.cancelled.set()
            job.emit(_End(self._run(job)))
            with self._lock:
                self._running = None
            del job  # while it waits, the worker keeps no request and no model alive

    def _run(self, job: Job) -> BaseException | None:
        """Do the work. A job cancelled by its consumer has nobody left who reads the error."""
        if job.cancelled.is_set():
            return BackendError("this backend was closed while the request waited")
        try:
            job.work(job)
        except BaseException as caught:  # whatever it is, its consumer waits and the others queue
            return caught
        return None
