"""System text for chat templates that know no system role (Gemma's refuses it).

In: messages. Out: the same with the system text at the head of the first user message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cacheslide_agents.chunks import Message


def folded_system(messages: Sequence[Message]) -> list[Message]:
    """A leading system message joined, by an empty line, to the user message after it."""
    if len(messages) < 2 or (messages[0].role, messages[1].role) != ("system", "user"):
        return list(messages)
    system, user, *rest = messages
    if not system.chunks:
        return [user, *rest]
    *chunks, last = system.chunks
    last = replace(last, text=f"{last.text}\n\n")
    return [replace(user, chunks=(*chunks, last, *user.chunks)), *rest]
