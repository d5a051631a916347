"""Chunk marks on an agent's messages.

In: messages as an agent keeps them. Out: copies that say where chunks begin, and what of them comes
again; the text of no prompt changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from langchain_core.messages import AnyMessage, BaseMessage, SystemMessage

from cacheslide_agents.chunks import Role
from langchain_cacheslide.messages import KEY

M = TypeVar("M", bound=BaseMessage)


def chunk_block(text: str, id: str, role: Role = Role.RECOMPUTE) -> dict[str, Any]:
    """A text block that is a chunk of its own: a memory block in a system message, say.

    SystemMessage([chunk_block(RULES, "rules", Role.REUSE), chunk_block(memory, "memory")])
    """
    mark = {"id": id, "role": Role(role).value}
    return {"type": "text", "text": text, "extras": {KEY: mark}}


def marked_system(message: SystemMessage) -> SystemMessage:
    """Blocks without a mark become chunks `system-N` that come again."""
    return _marked(message, "system")


def marked_messages(messages: Sequence[AnyMessage]) -> list[AnyMessage]:
    """Messages with an id become chunks `message-ID`: ids stay when older messages are gone."""
    return [
        message if message.id is None else _marked(message, f"message-{message.id}")
        for message in messages
    ]


def _marked(message: M, name: str) -> M:
    content = message.content
    given = [content] if isinstance(content, str) else content
    blocks = list(_blocks(given, name))
    return message.model_copy(update={"content": blocks}) if blocks else message


def _blocks(blocks: Sequence[Any], name: str) -> Iterator[Any]:
    for number, block in enumerate(blocks, start=1):
        text = block if isinstance(block, str) else _unmarked_text(block)
        own = name if len(blocks) == 1 else f"{name}-{number}"
        if text:
            yield chunk_block(text, own, Role.REUSE)
        elif block:
            yield block


def _unmarked_text(block: Any) -> str | None:
    """The text of a block that only holds text."""
    if isinstance(block, dict) and block.keys() <= {"type", "text", "id", "index"}:
        return block.get("text")
    return None
