"""A MemGPT-style companion to talk to.

In: what the user says, one message after the other. Out: what it replies; its memory in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from langchain_core.messages import HumanMessage
from langchain_core.runnables import Runnable, RunnableConfig
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.memory import InMemorySaver

from langchain_cacheslide.agents.memgpt import fresh_memory, memgpt_graph, past_exchange, reply


class Companion:
    """One thread of `memgpt_graph`, which begins with these blocks, archive and `seen` exchanges.

    `options` go to `memgpt_graph`. Threads live in `checkpointer` (default: in memory); the thread
    is the config's `thread_id`, or one of the companion's own. A thread that is there goes on.
    """

    def __init__(
        self,
        model: Runnable[Any, Any],
        *,
        persona: str,
        human: str = "",
        archive: Sequence[str] = (),
        seen: Sequence[tuple[str, str]] = (),
        block_limit: int = 2000,
        checkpointer: BaseCheckpointSaver[Any] | None = None,
        **options: Any,
    ) -> None:
        saver = InMemorySaver() if checkpointer is None else checkpointer
        self._graph = memgpt_graph(model, checkpointer=saver, **options)
        self._start = fresh_memory(persona, human, archive=archive, block_limit=block_limit)
        self._seen = [message for pair in seen for message in past_exchange(*pair)]
        self._thread = f"companion-{uuid4().hex}"

    def say(self, text: str, config: RunnableConfig | None = None) -> str:
        """Its reply to `text`; empty where it was out of steps before it replied."""
        threaded = self._threaded(config)
        begun = bool(self._graph.get_state(threaded).values)
        given = {} if begun else self._start
        seen = [] if begun else self._seen
        messages = [*seen, HumanMessage(text)]
        return reply(self._graph.invoke({**given, "messages": messages}, threaded))

    def memory(self, config: RunnableConfig | None = None) -> dict[str, Any]:
        """The blocks `persona` and `human`, and the `archive`, as they are now."""
        values = self._graph.get_state(self._threaded(config)).values or self._start
        return {name: values[name] for name in ("persona", "human", "archive")}

    def _threaded(self, config: RunnableConfig | None) -> RunnableConfig:
        given = config or {}
        configurable = {"thread_id": self._thread, **given.get("configurable", {})}
        return {**given, "configurable": configurable}
