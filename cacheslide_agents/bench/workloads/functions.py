"""The functions a MemGPT-style companion is offered, as JSON schemas. Data only."""

from __future__ import annotations

from typing import Any


def _function(name: str, description: str, **parameters: str) -> dict[str, Any]:
    return {
        "name": name,
        "description": description,
        "parameters": {
            "type": "object",
            "properties": {
                key: {"type": "integer" if key == "page" else "string", "description": text}
                for key, text in parameters.items()
            },
            "required": [key for key in parameters if key != "page"],
        },
    }


FUNCTIONS = [
    _function(
        "send_message",
        "Say something to the person you are talking to.",
        message="What to say.",
    ),
    _function(
        "core_memory_append",
        "Add one fact to core memory.",
        content="The fact, one sentence.",
    ),
    _function(
        "core_memory_replace",
        "Replace a fact in core memory that is no longer true.",
        old="The fact as it stands.",
        new="The fact as it should read; empty to forget it.",
    ),
    _function(
        "recall_search",
        "Search all earlier messages.",
        query="Words to look for.",
        page="Page of results, from 0.",
    ),
    _function(
        "archive_insert",
        "Write a passage into archival memory.",
        content="The passage.",
    ),
    _function(
        "archive_search",
        "Search archival memory by meaning.",
        query="What to look for.",
        page="Page of results, from 0.",
    ),
]
