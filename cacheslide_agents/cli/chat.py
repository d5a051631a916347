"""`cacheslide chat`: a conversation, one receipt a turn.

In: lines of stdin. Out: answers on stdout as they come, receipts on stderr.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from cacheslide_agents.backend import Sampling
from cacheslide_agents.cli import options
from cacheslide_agents.cli.answering import Answer, Asker, policy_named, receipt_line, write_piece
from cacheslide_agents.cli.console import emit, notes
from cacheslide_agents.cli.engine import opened
from cacheslide_agents.prompt.auto import chunk_messages


@options.sampled
def chat(
    system: options.System = None,
    model: options.Model = options.DEFAULT_MODEL,
    backend: options.BackendName = options.DEFAULT_BACKEND,
    device: options.Device = None,
    dtype: options.Dtype = None,
    threads: options.Threads = None,
    profiles: options.Profiles = None,
    settings: options.Settings = None,
    policy: options.Policy = None,
    *,
    sampling: Sampling,
    as_json: options.Json = False,
) -> None:
    """Talk with a model until end of input (Ctrl-D).

    With --json the whole conversation comes at the end.
    """
    chosen = policy_named(policy)
    dialogue = [{"role": "system", "content": system}] if system else []
    turns: list[dict[str, Any]] = []
    given = {"device": device, "dtype": dtype, "threads": threads, "profiles": profiles}
    with opened(backend, model, settings, **given) as loaded:
        asker = Asker(loaded, sampling, chosen)
        for said in _lines():
            dialogue.append({"role": "user", "content": said})
            answer = _answer(asker, dialogue, quiet=as_json)
            dialogue.append({"role": "assistant", "content": answer.text})
            turns.append({"user": said, **answer.to_dict()})
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


def _answer(asker: Asker, dialogue: list[dict[str, str]], *, quiet: bool) -> Answer:
    answer = asker.ask(chunk_messages(dialogue), None if quiet else write_piece)
    if not quiet:
        print()
        notes().print(receipt_line(answer.receipt))
    return answer
