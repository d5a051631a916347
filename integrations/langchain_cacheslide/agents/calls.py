"""What an agent asked its model, call by call.

In: LangChain's callbacks, `config={"callbacks": [log]}`. Out: a `Call` for each model call, with
its receipt where the model gives one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from time import perf_counter
from typing import Any
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import BaseMessage
from langchain_core.outputs import ChatGeneration, LLMResult
from langchain_core.runnables import Runnable, RunnableConfig

from langchain_cacheslide.hints import in_session, thread_of

STEP = "cacheslide_step"
RECORDED = "cacheslide_recorded"
_NODE = "langgraph_node"


@dataclass(frozen=True, slots=True)
class Call:
    """`step`: the agent's word for what it asked. `seconds`: wall time of the whole call.

    `text`: the model's own answer. `recorded`: the one that a `Replayed` model put in its place.
    `receipt`: as in `response_metadata["cacheslide"]`; empty where the model gives none.
    """

    step: str
    text: str
    seconds: float
    receipt: dict[str, Any]
    recorded: str | None = None


@dataclass(frozen=True, slots=True)
class _Open:
    step: str
    recorded: str | None
    start: float


class CallLog(BaseCallbackHandler):
    """Collects `calls` in the order in which they ended; `told` hears of each as it ends.

    Safe to share between threads. A call that failed is not in the list, nor one that had begun
    before the log was there.
    """

    def __init__(self, told: Callable[[Call], None] = lambda call: None) -> None:
        self.calls: list[Call] = []
        self._told = told
        self._open: dict[UUID, _Open] = {}
        self._lock = Lock()

    @property
    def seconds(self) -> float:
        """Wall time of all calls; overlapping ones count one after the other."""
        return sum(call.seconds for call in self.calls)

    def on_chat_model_start(
        self,
        serialized: dict[str, Any],
        messages: Sequence[Sequence[BaseMessage]],
        *,
        run_id: UUID,
        metadata: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        known = metadata or {}
        step = str(known.get(STEP) or known.get(_NODE) or "model")
        with self._lock:
            self._open[run_id] = _Open(step, known.get(RECORDED), perf_counter())

    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **kwargs: Any) -> None:
        with self._lock:
            opened = self._open.pop(run_id, None)
            if opened is None:
                return
            call = _call(opened, response)
            self.calls.append(call)
        self._told(call)

    def on_llm_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        with self._lock:
            self._open.pop(run_id, None)


def asking(model: Runnable[Any, Any], step: str, config: RunnableConfig) -> Runnable[Any, Any]:
    """`model`, whose calls are logged as `step` and belong to the session of the graph's thread."""
    return in_session(model.with_config(metadata={STEP: step}), thread_of(config))


def _call(asked: _Open, response: LLMResult) -> Call:
    seconds = perf_counter() - asked.start
    generation = response.generations[0][0]
    receipt: dict[str, Any] = {}
    if isinstance(generation, ChatGeneration):
        receipt = generation.message.response_metadata.get("cacheslide", {})
    return Call(asked.step, generation.text, seconds, receipt, asked.recorded)
