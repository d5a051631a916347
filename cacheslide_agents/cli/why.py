"""`cacheslide why`: what changed between two prompts, and what that costs.

In: two prompts. Out: the first difference, what exact-prefix caching would reuse against what
alignment does, the fields that change by themselves, the chunks, and what to do about it.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.table import Table

from cacheslide_agents.cli import options
from cacheslide_agents.cli.console import emit, screen
from cacheslide_agents.cli.models import tokenizer_of
from cacheslide_agents.cli.sources import PromptReader
from cacheslide_agents.prompt.compare import Comparison, compare

WORDS = "words and marks"
BEGINS = 32
"""Characters of a chunk that the table shows."""


def why(
    earlier: Annotated[str, typer.Argument(metavar="A", help="The prompt that was cached.")],
    newer: Annotated[str, typer.Argument(metavar="B", help="The prompt that came next.")],
    template: Annotated[
        str | None, typer.Option(help="A template's name or file; A and B are then its values.")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Count with this model's tokenizer.")
    ] = None,
    min_run: Annotated[int, typer.Option(min=1, help="Fewest tokens worth reusing.")] = 16,
    as_json: options.Json = False,
) -> None:
    """Explain what of prompt A prompt B shares, what a prefix cache loses, and what to move.

    A and B are files: a rendered prompt as text, a list of messages or a logged request as JSON, or
    line N of a log of requests, `log.jsonl:N`. With --template they are files of values. Without
    --model the tokens are words and marks.
    """
    reader = PromptReader(None if model is None else tokenizer_of(model))
    if template is None:
        pair = (reader.prompt(earlier), reader.prompt(newer))
    else:
        pair = (reader.rendered(template, earlier), reader.rendered(template, newer))
    found = compare(*pair, min_run=min_run)
    if as_json:
        emit({"tokenizer": model or WORDS, **to_dict(found)})
    else:
        _show(found, model or WORDS, roles=template is not None)


def to_dict(found: Comparison) -> dict[str, Any]:
    """Plain JSON values, the advice included."""
    segments = [{**asdict(each), "role": each.role.value} for each in found.segments]
    return {**asdict(found), "segments": segments, "advice": found.advice}


def _show(found: Comparison, tokenizer: str, *, roles: bool) -> None:
    """`roles` are an author's hints: prompts that were cut automatically have none."""
    console = screen()
    console.print(
        f"{found.tokens} tokens ({tokenizer}); {found.earlier_tokens} in the earlier prompt"
    )
    console.print(f"  exact-prefix caching reuses {found.prefix}, alignment {found.aligned}")
    if (change := found.difference) is not None:
        console.print(
            f"First difference: token {change.token}, chunk {change.chunk}, "
            f"line {change.line} of the prompt"
        )
        console.print(f"  after {change.shared!r}")
        console.print(f"  was   {change.was!r}")
        console.print(f"  now   {change.now!r}")
    for field in found.fields:
        place = f"token {field.token}, chunk {field.chunk}"
        console.print(f"Changes by itself: {field.kind} at {place}: {field.was!r} -> {field.now!r}")
    console.print(_segments(found, roles=roles))
    console.print(found.advice)


def _segments(found: Comparison, *, roles: bool) -> Table:
    table = Table()
    hints = ("role",) if roles else ()
    for column in ("chunk", *hints, "state", "tokens", "kept", "shift", "begins"):
        numeric = column in {"tokens", "kept", "shift"}
        table.add_column(column, justify="right" if numeric else "left")
    for one in found.segments:
        shift = "-" if one.shift is None else f"{one.shift:+d}"
        hint = (one.role.value,) if roles else ()
        counts = (str(one.tokens), str(one.kept), shift)
        begins = " ".join(one.begins.split())[:BEGINS]
        table.add_row(one.id, *hint, one.state, *counts, begins)
    return table
