"""`cacheslide demo`: three trials of one question, with reuse and without.

In: a question shipped with the package. Out: times to the first token, what became of each chunk,
the answers, and whether they are equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any
from uuid import uuid4

import typer
from rich.table import Table

from cacheslide_agents.answered import Answered
from cacheslide_agents.backend import Backend, Receipt, Sampling
from cacheslide_agents.chunks import ChunkedPrompt
from cacheslide_agents.cli import options
from cacheslide_agents.cli.answering import Asker, policy_named, to_dict, verdict
from cacheslide_agents.cli.console import emit, screen
from cacheslide_agents.cli.engine import BackendOptions, with_plain_backend
from cacheslide_agents.prompt.auto import chunk_messages


@dataclass(frozen=True, slots=True)
class Trial:
    """The same prompt, answered with reuse and densely."""

    number: int
    reuse: Answered
    dense: Answered

    @property
    def speedup(self) -> float:
        """Dense over reuse, in time to first token."""
        return self.dense.receipt.ttft_s / self.reuse.receipt.ttft_s

    @property
    def equal(self) -> bool:
        return self.reuse.text == self.dense.text

    def to_dict(self) -> dict[str, Any]:
        return {
            "trial": self.number,
            "ttft_speedup": self.speedup,
            "answers_equal": self.equal,
            "reuse": to_dict(self.reuse),
            "dense": to_dict(self.dense),
        }


@with_plain_backend
def demo(
    *,
    question: Annotated[int, typer.Option(min=0, help="Which shipped question.")] = 0,
    backend: BackendOptions,
    policy: options.Policy = None,
    max_tokens: options.MaxTokens = 24,
    as_json: options.Json = False,
) -> None:
    """Run a small Reflexion episode twice, with reuse and densely, and compare."""
    from cacheslide_agents.bench.demo import demo_episode

    episode = demo_episode(question)
    prompts = episode.prompts()
    trials = []
    with backend.opened() as loaded:
        if not as_json:
            print(f"Question: {episode.question.question}")
            print(f"Gold answer: {episode.question.answer}")
            print("What counts is that both ways answer alike; a small model is often wrong.")
        for trial in run_trials(loaded, prompts, policy, max_tokens):
            trials.append(trial)
            if not as_json:
                _show(trial)
    equal = all(trial.equal for trial in trials)
    if not as_json:
        print("All answers are equal." if equal else "The answers are NOT all equal.")
        return
    emit(
        {
            "model": loaded.model_id,
            "question": episode.question.question,
            "gold": episode.question.answer,
            "answers_equal": equal,
            "trials": [trial.to_dict() for trial in trials],
        }
    )


def run_trials(
    backend: Backend, prompts: list[ChunkedPrompt], policy: str | None, max_tokens: int
) -> Iterator[Trial]:
    """Both arms on every prompt, one after the other; which goes first alternates."""
    sampling = Sampling(max_tokens=max_tokens)
    namespace = f"demo-{uuid4().hex}"
    reuse = Asker(backend, sampling, policy_named(policy), namespace)
    dense = Asker(backend, sampling, policy_named("recompute"), namespace)
    # The first request of a process pays for what is set up lazily; no arm should.
    dense.ask(chunk_messages([{"role": "user", "content": "Hello"}]))
    for number, prompt in enumerate(prompts, start=1):
        if number % 2:
            first = reuse.ask(prompt)
            yield Trial(number, first, dense.ask(prompt))
        else:
            first = dense.ask(prompt)
            yield Trial(number, reuse.ask(prompt), first)


def _show(trial: Trial) -> None:
    reuse, dense = trial.reuse, trial.dense
    cold = reuse.receipt.outcome == "cold"
    gain = "nothing is stored yet" if cold else f"{trial.speedup:.1f}x"
    print(
        f"\nTrial {trial.number}: first token after {reuse.receipt.ttft_s:.3f} s with reuse, "
        f"{dense.receipt.ttft_s:.3f} s without ({gain})"
    )
    screen().print(_chunks(reuse.receipt))
    if trial.equal:
        print(f"Answer, the same both ways: {_said(reuse)}")
    else:
        print(f"Answer with reuse:    {_said(reuse)}")
        print(f"Answer without reuse: {_said(dense)}")


def _said(answer: Answered) -> str:
    cut = " ... (cut at --max-tokens)" if answer.finish_reason == "length" else ""
    return answer.text.strip() + cut


def _chunks(receipt: Receipt) -> Table:
    table = Table(title=verdict(receipt), title_justify="left")
    columns = ("chunk", "role", "tokens", "outcome", "shift", "reused", "corrected", "reason")
    for column in columns:
        numeric = column in {"tokens", "shift", "reused", "corrected"}
        table.add_column(column, justify="right" if numeric else "left")
    for chunk in receipt.chunks:
        shift = "-" if chunk.shift is None else f"{chunk.shift:+d}"
        counts = (str(chunk.tokens), chunk.outcome, shift, str(chunk.reused), str(chunk.corrected))
        table.add_row(chunk.id, chunk.role.value, *counts, chunk.reason)
    return table
