"""`cacheslide inspect`: the chunks of a template.

In: a template, values if at hand. Out: its chunks, roles and, once rendered, their tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.table import Table

from cacheslide_agents.chunks import ChunkedPrompt, Role
from cacheslide_agents.cli import options
from cacheslide_agents.cli.console import emit, notes, screen
from cacheslide_agents.cli.models import tokenizer_of
from cacheslide_agents.cli.templates import find_template, read_values
from cacheslide_agents.errors import RequestError, TokenizerError
from cacheslide_agents.prompt.chat import ChatEncoder
from cacheslide_agents.prompt.count import count_tokens
from cacheslide_agents.prompt.template import PromptTemplate

ENCODING = "cl100k_base"
ESTIMATE = "estimate: UTF-8 bytes / 4"


def inspect(
    template: Annotated[str, typer.Argument(help="A template's name or file.")],
    values: options.Values = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Count with this model's tokenizer.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Show a template's chunks, roles and token counts.

    Without --values the chunks as they stand in the file. With values and --model the tokens of
    the prompt as it would be sent; without --model those of the chunks' text alone.
    """
    if model is not None and values is None:
        raise RequestError("--model counts the tokens of a rendered prompt; give its --values too")
    found = find_template(template)
    if values is None:
        report = _declared(found)
    else:
        prompt = found.render(**read_values(values))
        report = _rendered(prompt) if model is None else _encoded(prompt, model)
    if as_json:
        emit({"template": found.path, "task": found.task, **report})
        return
    screen().print(_table(found.task, report["chunks"]))
    total = report["prompt_tokens"]
    notes().print(
        "no token counts without --values"
        if total is None
        else f"{total} tokens, counted with {report['tokenizer']}"
    )


def _declared(template: PromptTemplate) -> dict[str, Any]:
    chunks = [{**asdict(chunk), "role": chunk.role.value} for chunk in template.chunks()]
    return {"tokenizer": None, "prompt_tokens": None, "chunks": chunks}


def _rendered(prompt: ChunkedPrompt) -> dict[str, Any]:
    """Tokens of each chunk's text; the chat template's own markup is not known here."""
    name, count = _counter()
    chunks: list[dict[str, Any]] = [
        _row(chunk.id, chunk.role, message.role, count(chunk.text))
        for message in prompt.messages
        for chunk in message.chunks
    ]
    total = sum(chunk["tokens"] for chunk in chunks)
    return {"tokenizer": name, "prompt_tokens": total, "chunks": chunks}


def _encoded(prompt: ChunkedPrompt, model: str) -> dict[str, Any]:
    """Tokens of each chunk in the prompt as it is sent, the chat template's markup included."""
    encoded = ChatEncoder(tokenizer_of(model)).encode(prompt)
    spoken = {chunk.id: message.role for message in prompt.messages for chunk in message.chunks}
    chunks = [_row(span.id, span.role, spoken.get(span.id), len(span)) for span in encoded.spans]
    return {"tokenizer": model, "prompt_tokens": len(encoded.ids), "chunks": chunks}


def _row(name: str, role: Role, message: str | None, tokens: int) -> dict[str, Any]:
    return {"id": name, "role": role.value, "message": message, "tokens": tokens}


def _counter() -> tuple[str, Callable[[str], int]]:
    """tiktoken, or its documented estimate where its encoding cannot be fetched; tried once."""
    try:
        count_tokens("", ENCODING)
    except TokenizerError:
        return ESTIMATE, lambda text: count_tokens(text, ENCODING, fallback="bytes")
    return f"tiktoken {ENCODING}", lambda text: count_tokens(text, ENCODING)


def _table(task: str, chunks: list[dict[str, Any]]) -> Table:
    columns = [
        "id",
        "role",
        "message",
        "line" if any("line" in one for one in chunks) else "tokens",
    ]
    table = Table(title=task)
    for column in columns:
        table.add_column(column, justify="right" if column in {"tokens", "line"} else "left")
    for chunk in chunks:
        table.add_row(*("-" if chunk[column] is None else str(chunk[column]) for column in columns))
    return table
