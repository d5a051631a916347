"""One thread that owns a vLLM engine and serves many callers at once.

In: prompts with sampling parameters, from any thread or event loop; calls to the workers. Out:
vLLM's outputs, each to the caller it belongs to. A caller that goes away aborts its request.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import count
from queue import SimpleQueue
from threading import Lock, Thread
from time import sleep
from typing import Any

from vllm import RequestOutput, SamplingParams
from vllm.v1.engine.core_client import InprocClient
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.llm_engine import LLMEngine

from cacheslide_agents.errors import BackendError, RequestError
from cacheslide_agents.streams import CallOff, End, Sink, apiped, piped, send
from vllm_cacheslide.guard import log

_TRIES = 1000
"""Ten seconds of asking."""


@dataclass(frozen=True)
class _Add:
    id: str
    prompt_ids: list[int]
    params: SamplingParams
    sink: Sink


@dataclass(frozen=True)
class _Abort:
    id: str


@dataclass(frozen=True)
class _Call:
    work: Callable[[LLMEngine], Any]
    result: Future[Any]


class EngineThread:
    """`make` builds the engine on the thread itself; its error is raised here."""

    def __init__(self, make: Callable[[], LLMEngine]) -> None:
        self._make = make
        self._inbox: SimpleQueue[_Add | _Abort | _Call | None] = SimpleQueue()
        self._sinks: dict[str, Sink] = {}
        self._numbers = count()
        self._lock = Lock()
        self._closed = False
        self._thread = Thread(target=self._serve, name="cacheslide-vllm", daemon=True)
        made: Future[Any] = Future()
        self._inbox.put(_Call(lambda engine: engine, made))
        self._thread.start()
        made.result()

    def stream(
        self, name: str, prompt_ids: Sequence[int], params: SamplingParams
    ) -> Generator[RequestOutput, None, None]:
        """Yields until the request has finished; closing the iterator aborts it."""
        return piped(partial(self._submit, name, prompt_ids, params))

    def astream(
        self, name: str, prompt_ids: Sequence[int], params: SamplingParams
    ) -> AsyncGenerator[RequestOutput, None]:
        """The same for asyncio; cancelling the task aborts the request."""
        return apiped(partial(self._submit, name, prompt_ids, params))

    def call(self, work: Callable[[LLMEngine], Any]) -> Any:
        """`work(engine)`, between two steps of the engine."""
        result: Future[Any] = Future()
        self._put(_Call(work, result))
        return result.result()

    def forget_prefixes(self) -> None:
        """Empties vLLM's prefix cache. The blocks of what has just ended are in use for a moment;
        `BackendError` if they stay so."""
        for _ in range(_TRIES):
            if self.call(lambda engine: engine.reset_prefix_cache()):
                return
            sleep(0.01)
        raise BackendError("vLLM's prefix cache is in use: let all requests end first")

    def close(self) -> None:
        """Ends the engine; open requests fail with `BackendError`. Safe to call twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._inbox.put(None)
        self._thread.join()

    def _submit(
        self, name: str, prompt_ids: Sequence[int], params: SamplingParams, sink: Sink
    ) -> CallOff:
        id_ = f"{name}-{next(self._numbers)}"
        self._put(_Add(id_, [int(token) for token in prompt_ids], params, sink))
        return partial(self._inbox.put, _Abort(id_))

    def _put(self, item: _Add | _Call) -> None:
        with self._lock:
            if self._closed or not self._thread.is_alive():
                raise BackendError("this backend is closed; make a new one")
            self._inbox.put(item)

    def _serve(self) -> None:
        try:
            engine = self._make()
        except BaseException as error:
            self._refuse(error)
            return
        in_process = isinstance(engine.engine_core, InprocClient)
        try:
            while (item := self._inbox.get()) is not None:
                self._act(engine, item)
                while self._inbox.empty() and engine.has_unfinished_requests():
                    self._deliver(engine.step())
                if in_process and not engine.has_unfinished_requests():
                    engine.step()  # tells the workers who has finished
        except BaseException as error:
            self._refuse(error)
        else:
            self._refuse(BackendError("this backend was closed"))
        finally:
            engine.engine_core.shutdown()

    def _act(self, engine: LLMEngine, item: _Add | _Abort | _Call) -> None:
        if isinstance(item, _Call):
            try:
                item.result.set_result(item.work(engine))
            except BaseException as error:
                item.result.set_exception(error)
        elif isinstance(item, _Abort):
            if self._sinks.pop(item.id, None) is not None:
                engine.abort_request([item.id])
        else:
            self._add(engine, item)

    def _add(self, engine: LLMEngine, item: _Add) -> None:
        self._sinks[item.id] = item.sink
        try:
            engine.add_request(item.id, {"prompt_token_ids": item.prompt_ids}, item.params)
        except EngineDeadError:
            raise
        except Exception as error:
            del self._sinks[item.id]
            _forget(engine, item.id)
            send(item.sink, End(RequestError(f"vLLM refuses the request: {error}")))

    def _deliver(self, outputs: Sequence[Any]) -> None:
        for output in outputs:
            sink = self._sinks.get(output.request_id)
            if sink is None:
                continue
            alive = send(sink, output)
            if output.finished:
                del self._sinks[output.request_id]
                send(sink, End())
            elif not alive:
                self._inbox.put(_Abort(output.request_id))

    def _refuse(self, error: BaseException) -> None:
        """Everybody who waits, and whoever comes in the meantime."""
        with self._lock:
            self._closed = True
        sinks, self._sinks = list(self._sinks.values()), {}
        while not self._inbox.empty():
            item = self._inbox.get()
            if isinstance(item, _Call):
                item.result.set_exception(error)
            elif isinstance(item, _Add):
                sinks.append(item.sink)
        for sink in sinks:
            send(sink, End(error))


def _forget(engine: LLMEngine, id_: str) -> None:
    """vLLM counts a request as its own before it sends it to the core, and keeps it if that fails:
    it would be waited for, for ever."""
    try:
        engine.abort_request([id_])
    except EngineDeadError:
        raise
    except Exception:  # what could not be sent cannot be called back, and need not be
        log.warning("request %a: the engine's core knows nothing of it", id_, exc_info=True)
