"""`cacheslide generate`: one prompt, one answer.

In: a prompt, or a template with values. Out: the answer on stdout as it comes, the receipt on
stderr.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from cacheslide_agents.backend import Sampling
from cacheslide_agents.chunks import ChunkedPrompt
from cacheslide_agents.cli import options
from cacheslide_agents.cli.answering import (
    Asker,
    policy_named,
    receipt_line,
    to_dict,
)
from cacheslide_agents.cli.console import emit, notes
from cacheslide_agents.cli.engine import BackendOptions, with_backend
from cacheslide_agents.cli.templates import find_template, read_values
from cacheslide_agents.errors import RequestError
from cacheslide_agents.prompt.auto import chunk_messages


@options.sampled
@with_backend
def generate(
    *,
    prompt: Annotated[str | None, typer.Argument(help="The prompt; - reads stdin.")] = None,
    template: Annotated[str | None, typer.Option(help="A template's name or file.")] = None,
    values: options.Values = None,
    system: options.System = None,
    backend: BackendOptions,
    policy: options.Policy = None,
    sampling: Sampling,
    as_json: options.Json = False,
) -> None:
    """Answer one prompt."""
    asked = _prompt(prompt, template, values, system)
    chosen = policy_named(policy)
    with backend.opened() as loaded:
        asker = Asker(loaded, sampling, chosen)
        answer = asker.ask(asked, shown=not as_json)
        if as_json:
            emit({"model": loaded.model_id, **to_dict(answer)})
            return
    print()
    notes().print(receipt_line(answer.receipt))


def _prompt(
    prompt: str | None, template: str | None, values: str | None, system: str | None
) -> ChunkedPrompt:
    if (prompt is None) == (template is None):
        raise RequestError("give either a PROMPT (- for stdin) or --template")
    if template is not None:
        if system is not None:
            raise RequestError("--system goes with a PROMPT; a template has its own messages")
        return find_template(template).render(**(read_values(values) if values else {}))
    if values is not None:
        raise RequestError("--values goes with --template")
    text = sys.stdin.read() if prompt == "-" else prompt
    dialogue: list[dict[str, Any]] = [{"role": "user", "content": text}]
    if system is not None:
        dialogue.insert(0, {"role": "system", "content": system})
    return chunk_messages(dialogue)
