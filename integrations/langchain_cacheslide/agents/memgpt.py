"""A MemGPT-style companion as a LangGraph graph: it keeps its own memory by calling functions.

In: `{"messages": [what the user says now]}`, a thread that remembers. Out: what it replied.
System | memory block | function schemas | queue of messages, by `memgpt.jinja` (MemGPT: Packer et
al. 2023).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from operator import add
from typing import Annotated, Any, TypedDict
from uuid import uuid4

from langchain_core.messages import (
    AIMessage,
    AnyMessage,
    BaseMessage,
    HumanMessage,
    RemoveMessage,
    ToolCall,
    ToolMessage,
)
from langchain_core.messages.utils import count_tokens_approximately
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.tools import BaseTool
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.graph.state import CompiledStateGraph
from langgraph.prebuilt import ToolNode

from cacheslide_agents.errors import RequestError
from langchain_cacheslide.agents.calls import asking
from langchain_cacheslide.agents.function_calls import call_format, function_schemas, parsed_call
from langchain_cacheslide.agents.memory import EDITED, MEMORY_TOOLS, SAY
from langchain_cacheslide.template import TemplateRunnable

KEPT = 0.7
"""Share of the budget that the queue may still fill after an eviction, so that evictions are rare:
each one moves everything behind it."""


class MemGPTState(TypedDict, total=False):
    """What a checkpoint holds. `messages` is the queue; `archive` what left it or was written."""

    messages: Annotated[list[AnyMessage], add_messages]
    persona: str
    human: str
    block_limit: int
    archive: Annotated[list[str], add]
    edits: Annotated[int, add]
    changed: str
    steps: int


def memgpt_graph(
    model: Runnable[Any, Any],
    *,
    tools: Sequence[BaseTool] = MEMORY_TOOLS,
    queue_tokens: int = 2000,
    steps: int = 4,
    constrained: bool = True,
    count_tokens: Callable[[Sequence[BaseMessage]], int] = count_tokens_approximately,
    clock: Callable[[], datetime] = datetime.now,
    checkpointer: BaseCheckpointSaver[Any] | None = None,
) -> CompiledStateGraph[Any, Any, Any, Any]:
    """At most `steps` model calls for each message of the user.

    `queue_tokens`: budget of the messages in view; `constrained` asks the model to keep to the
    schema of a call (`response_format`). Start a thread with `fresh_memory(...)`. Raises
    `RequestError` for fewer than one step.
    """
    if steps < 1:
        raise RequestError(f"steps={steps} must be at least 1")
    agent = _Companion(
        model,
        tools,
        steps=steps,
        constrained=constrained,
        leaving=partial(evicted, budget=queue_tokens, count=count_tokens),
        clock=clock,
    )
    graph = StateGraph(MemGPTState)
    graph.add_node("evict", agent.evict)
    graph.add_node("think", agent.think)
    graph.add_node("act", ToolNode(list(tools)))
    graph.add_node("stamp", agent.stamp)
    graph.add_edge(START, "evict")
    graph.add_edge("evict", "think")
    graph.add_conditional_edges("think", agent.calls, ["act", END])
    graph.add_edge("act", "stamp")
    graph.add_conditional_edges("stamp", agent.goes_on, ["think", END])
    return graph.compile(checkpointer=checkpointer, name="memgpt")


@dataclass(frozen=True)
class _Companion:
    """The graph's nodes. `leaving` gives the messages that have to leave a queue."""

    model: Runnable[Any, Any]
    tools: Sequence[BaseTool]
    steps: int
    constrained: bool
    leaving: Callable[[Sequence[AnyMessage]], list[AnyMessage]]
    clock: Callable[[], datetime]
    template: TemplateRunnable = field(default_factory=lambda: TemplateRunnable.named("memgpt"))

    def evict(self, state: MemGPTState) -> dict[str, Any]:
        leaving = self.leaving(state["messages"])
        return {
            "steps": 0,
            "messages": [RemoveMessage(id=str(message.id)) for message in leaving],
            "archive": [text for message in leaving if (text := _archived(message))],
        }

    def think(self, state: MemGPTState, config: RunnableConfig) -> dict[str, Any]:
        step = state["steps"] + 1
        chain = self.template | asking(self._caller(step), "think", config)
        said = chain.invoke(_values(state, function_schemas(self.tools)), config)
        call = parsed_call(said.text)
        message = AIMessage(said.text, tool_calls=[call] if call else [])
        return {"messages": [message], "steps": step}

    def stamp(self, state: MemGPTState) -> dict[str, Any]:
        edited = getattr(state["messages"][-1], "artifact", None) == EDITED
        return {"changed": f"{self.clock():%Y-%m-%d %H:%M}"} if edited else {}

    def calls(self, state: MemGPTState) -> str:
        last = state["messages"][-1]
        return "act" if isinstance(last, AIMessage) and last.tool_calls else END

    def goes_on(self, state: MemGPTState) -> str:
        done = _is_sent(state["messages"][-1]) or state["steps"] >= self.steps
        return END if done else "think"

    def _caller(self, step: int) -> Runnable[Any, Any]:
        """The last step can only be a reply."""
        if not self.constrained:
            return self.model
        reply_only = [tool for tool in self.tools if tool.name == SAY]
        allowed = reply_only if step == self.steps and reply_only else self.tools
        return self.model.bind(response_format=call_format(allowed))


def fresh_memory(
    persona: str, human: str = "", *, archive: Sequence[str] = (), block_limit: int = 2000
) -> dict[str, Any]:
    """What a new thread begins with; merge it into the first input."""
    blocks = {"persona": persona, "human": human, "block_limit": block_limit}
    return {**blocks, "archive": list(archive), "edits": 0, "changed": "never"}


def past_exchange(said: str, replied: str) -> list[AnyMessage]:
    """Messages of an exchange that a new thread finds in its queue."""
    call = ToolCall(name=SAY, args={"message": replied}, id=f"call_{uuid4().hex}", type="tool_call")
    text = json.dumps({"name": SAY, "arguments": call["args"]}, ensure_ascii=False)
    sent = ToolMessage(replied, tool_call_id=str(call["id"]), name=SAY)
    return [HumanMessage(said), AIMessage(text, tool_calls=[call]), sent]


def reply(state: Mapping[str, Any]) -> str:
    """What the user gets to read: the last message sent, or else what the model said last."""
    last = state["messages"][-1]
    return last.text if _is_sent(last) or isinstance(last, AIMessage) else ""


def evicted(
    queue: Sequence[AnyMessage], budget: int, count: Callable[[Sequence[BaseMessage]], int]
) -> list[AnyMessage]:
    """The oldest messages that have to leave a queue over its budget, in whole exchanges.

    The exchange that is under way stays whatever its length.
    """
    if count(queue) <= budget:
        return []
    starts = [i for i, message in enumerate(queue) if isinstance(message, HumanMessage)]
    for start in starts[1:]:
        if count(queue[start:]) <= KEPT * budget:
            return list(queue[:start])
    return list(queue[: starts[-1]]) if starts else []


def _is_sent(message: BaseMessage) -> bool:
    """Whether the user got to read it; a wrong call of `send_message` has an error instead."""
    return isinstance(message, ToolMessage) and message.name == SAY and message.status != "error"


def _values(state: MemGPTState, functions: list[dict[str, Any]]) -> dict[str, Any]:
    """From the agent's state to the template's values."""
    return {
        "timestamp": state["changed"],
        "counters": {
            "messages in view": len(state["messages"]),
            "edits of core memory": state["edits"],
            "passages in archival memory": len(state["archive"]),
        },
        "persona": state["persona"],
        "human": state["human"],
        "block_limit": state["block_limit"],
        "functions": functions,
        "history": [_entry(message) for message in state["messages"]],
    }


def _entry(message: AnyMessage) -> dict[str, str]:
    role = {"human": "user", "ai": "assistant"}.get(message.type, "tool")
    shown = "Sent." if _is_sent(message) else message.text
    return {"id": str(message.id), "role": role, "text": shown}


def _archived(message: AnyMessage) -> str:
    """Function calls and their results are not worth keeping; what was said is."""
    if isinstance(message, ToolMessage):
        return f"assistant: {message.text}" if _is_sent(message) else ""
    return f"user: {message.text}" if isinstance(message, HumanMessage) else ""
