"""`cacheslide chat`: a conversation, one receipt a turn.

In: lines of stdin. Out: answers on stdout as they come, receipts on stderr.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from cacheslide_agents.answered import Answered
from cacheslide_agents.backend import Sampling
from cacheslide_agents.cli import options
from cacheslide_agents.cli.answering import (
    Asker,
    policy_named,
    receipt_line,
    to_dict,
)
from cacheslide_agents.cli.console import emit, notes
from cacheslide_agents.cli.engine import BackendOptions, with_backend
from cacheslide_agents.prompt.auto import chunk_messages


@options.sampled
@with_backend
def chat(
    *,
    system: options.System = None,
    backend: BackendOptions,
    policy: options.Policy = None,
    sampling: Sampling,
    as_json: options.Json = False,
) -> None:
    """Talk with a model until end of input (Ctrl-D).

    With --json the whole conversation comes at the end.
    """
    chosen = policy_named(policy)
    dialogue = [{"role": "system", "content": system}] if system else []
    turns: list[dict[str, Any]] = []
    with backend.opened() as loaded:
        asker = Asker(loaded, sampling, chosen)
        for said in _lines():
            dialogue.append({"role": "user", "content": said})
            answer = _answer(asker, dialogue, quiet=as_json)
            dialogue.append({"role": "assistant", "content": answer.text})
            turns.append({"user": said, **to_dict(answer)})
    if as_json:
        emit({"model": loaded.model_id, "turns": turns})


def _lines() -> Iterator[str]:
    """What the user says, line by line; blank lines are passed over."""
    prompt = notes()
    while True:
        if sys.stdin.isatty():
            prompt.print("> ", end="")
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.rstrip("\n")


def _answer(asker: Asker, dialogue: list[dict[str, str]], *, quiet: bool) -> Answered:
    answer = asker.ask(chunk_messages(dialogue), shown=not quiet)
    if not quiet:
        print()
        notes().print(receipt_line(answer.receipt))
    return answer
