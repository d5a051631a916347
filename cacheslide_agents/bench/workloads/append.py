"""Append: the three agents' turns with nothing edited, the best case of exact-prefix caching.

In: the same files. Out: drafts whose turn t is the prompt of turn t-1, then the model's reply and
the next message: feedback on an answer, another question, or a command's output.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

from cacheslide_agents.bench.datasets import Dialogue, dialogues
from cacheslide_agents.bench.workloads import memgpt, reflexion, swe_agent
from cacheslide_agents.bench.workloads.base import Draft, Limits, Turn
from cacheslide_agents.chunks import Chunk, ChunkedPrompt, Message

FEEDBACK = "That answer is wrong. Read the passages again and give another answer only.\nAnswer:"
_FINISH = re.compile(r"Finish\[(.*?)\]")


@dataclass(frozen=True, slots=True)
class Exchange:
    """What is appended: the model's reply, the next message, and gold answers to that message."""

    reply: str
    message: str
    answers: tuple[str, ...] = ()

    def after(self, prompt: ChunkedPrompt) -> ChunkedPrompt:
        messages = (
            Message("assistant", (Chunk("appended-reply", self.reply),)),
            Message("user", (Chunk("appended-message", self.message),)),
        )
        return ChunkedPrompt((*prompt.messages, *messages), prompt.task)


def drafts(folder: Path, limits: Limits) -> list[Draft]:
    """The drafts of all three agents; `Draft.task` says whose."""
    return [*_reflexion(folder, limits), *_memgpt(folder, limits), *_swe_agent(folder, limits)]


def last_answer(trajectory: str) -> str:
    """What an attempt finished with, or else its last line."""
    finished = _FINISH.findall(trajectory)
    return str(finished[-1]) if finished else trajectory.strip().rpartition("\n")[2]


def _reflexion(folder: Path, limits: Limits) -> list[Draft]:
    corpus = reflexion.Corpus.read(folder)
    found = []
    for run in corpus.runs:
        question = corpus.question(run)
        for before, now in pairwise(run.trials):
            prompt = partial(
                reflexion.reflexion_prompt, question, before.reflections, corpus.examples
            )
            exchange = partial(
                Exchange, last_answer(before.trajectory), FEEDBACK, (question.answer,)
            )
            found.append(_draft("reflexion", run.id, now.trial, prompt, exchange, limits))
    return found


def _memgpt(folder: Path, limits: Limits) -> list[Draft]:
    found = []
    for dialogue in dialogues(folder / "msc" / "dev.jsonl"):
        for number, asked in enumerate(pairwise(dialogue.questions), start=1):
            (question, answer), (message, gold) = asked
            prompt = partial(_memgpt_prompt, dialogue, question, limits)
            exchange = partial(Exchange, answer, f"Question: {message}", (gold,))
            name = f"{dialogue.id}:{number}"
            found.append(
                _draft("memgpt", name, memgpt.exchanges(dialogue), prompt, exchange, limits)
            )
    return found


def _memgpt_prompt(dialogue: Dialogue, question: str, limits: Limits) -> ChunkedPrompt | None:
    _, now = memgpt.moments(dialogue, question)
    sessions = memgpt.shown_sessions(now, limits)
    return None if sessions is None else now.prompt(sessions)


def _swe_agent(folder: Path, limits: Limits) -> list[Draft]:
    found = []
    for agent in swe_agent.agents(folder, limits):
        for turn in agent.turns:
            exchange = partial(_command, agent, turn)
            prompt = partial(agent.prompt, turn - 1)
            found.append(_draft("swe_agent", agent.id, turn, prompt, exchange, limits))
    return found


def _command(agent: swe_agent.Agent, turn: int) -> Exchange:
    action, output = agent.exchange(turn)
    return Exchange(action, f"Output:\n{output}")


def _draft(
    task: str,
    name: str,
    turn: int,
    previous: Callable[[], ChunkedPrompt | None],
    following: Callable[[], Exchange],
    limits: Limits,
) -> Draft:
    def build() -> Turn | None:
        before, exchange = previous(), following()
        if before is None or not limits.fits(now := exchange.after(before)):
            return None
        return Turn(f"{task}/{name}", turn, task, before, now, exchange.answers)

    return Draft(f"{task}/{name}", turn, task, build)
