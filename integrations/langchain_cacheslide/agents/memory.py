"""The functions by which a MemGPT-style companion keeps its own memory.

In: calls of these functions, and the agent's state. Out: updates of that state, with a message that
says what happened. A wrong call is answered, never raised: the model shall try again.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from langchain_core.messages import ToolMessage
from langchain_core.tools import BaseTool, InjectedToolCallId, tool
from langgraph.prebuilt import InjectedState
from langgraph.types import Command

from langchain_cacheslide.agents.archive import search

Block = Literal["human", "persona"]
SAY = "send_message"
EDITED = "edited"
"""Artifact of the message that says so."""
PAGE = 3
"""Passages that a search returns at a time."""

_State = Annotated[dict[str, Any], InjectedState]
_Call = Annotated[str, InjectedToolCallId]


@tool
def send_message(message: str, call: _Call) -> ToolMessage:
    """Say something to the person you are talking to. This ends your turn."""
    return ToolMessage(message, tool_call_id=call, name=SAY)


@tool
def core_memory_append(
    block: Block, content: str, state: _State, call: _Call
) -> Command[Any] | ToolMessage:
    """Add one fact, a sentence, to a block of core memory."""
    old = str(state[block])
    return _edited(state, block, f"{old}\n{content}" if old else content, call)


@tool
def core_memory_replace(
    block: Block, old: str, new: str, state: _State, call: _Call
) -> Command[Any] | ToolMessage:
    """Replace text of a block of core memory that is no longer true; empty `new` forgets it."""
    text = str(state[block])
    if not old or old not in text:
        return _answer(f"The {block} block does not hold {old!r}; nothing was changed.", call)
    kept = (line for line in text.replace(old, new, 1).split("\n") if line.strip())
    return _edited(state, block, "\n".join(kept), call)


@tool
def archival_memory_insert(content: str, state: _State, call: _Call) -> Command[Any]:
    """Write a passage into archival memory."""
    done = _answer("Written to archival memory.", call)
    return Command(update={"archive": [content], "messages": [done]})


@tool
def archival_memory_search(query: str, state: _State, call: _Call, page: int = 0) -> ToolMessage:
    """Search archival memory and the messages that are out of view; pages count from 0."""
    found = search(state["archive"], query)
    shown = found[page * PAGE : (page + 1) * PAGE] if page >= 0 else []
    return _answer("\n".join(shown) or f"Nothing is on page {page} for {query!r}.", call)


MEMORY_TOOLS: tuple[BaseTool, ...] = (
    send_message,
    core_memory_append,
    core_memory_replace,
    archival_memory_insert,
    archival_memory_search,
)


def _edited(
    state: dict[str, Any], block: Block, text: str, call: str
) -> Command[Any] | ToolMessage:
    excess = len(text) - state["block_limit"]
    if excess > 0:
        return _answer(f"The {block} block would be {excess} characters too long.", call)
    done = ToolMessage(f"The {block} block was changed.", tool_call_id=call, artifact=EDITED)
    return Command(update={block: text, "edits": 1, "messages": [done]})


def _answer(text: str, call: str) -> ToolMessage:
    return ToolMessage(text, tool_call_id=call)
