"""How many tokens a prompt has.

In: messages and tools. Out: the exact number where the tokenizer is at hand, else an estimate.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from langchain_core.messages import BaseMessage

from cacheslide_agents.backend import Backend
from cacheslide_agents.prompt.count import count_tokens
from langchain_cacheslide.binding import openai_tools
from langchain_cacheslide.loader import BackendLoader
from langchain_cacheslide.messages import from_messages

_PER_MESSAGE = 4
"""Tokens that chat templates put around a message, more or less."""


def counted_prompt(
    backend: Backend,
    loader: BackendLoader,
    messages: Sequence[BaseMessage],
    tools: Sequence[Any] | None,
) -> int:
    """Tokens of the prompt as it would be sent."""
    schemas = openai_tools(tools)
    encoder = loader.encoder(backend.tokenizer)
    return len(encoder.encode(from_messages(messages), tools=schemas).ids)


def estimated(text: str) -> int:
    """Tokens in a common encoding, or a quarter of the bytes."""
    return count_tokens(text, fallback="bytes")


def estimated_prompt(messages: Sequence[BaseMessage], tools: Sequence[Any] | None) -> int:
    prompt = from_messages(messages)
    schemas = [json.dumps(tool, ensure_ascii=False) for tool in openai_tools(tools)]
    said = sum(_PER_MESSAGE + estimated(message.content) for message in prompt.messages)
    return said + sum(map(estimated, schemas))
