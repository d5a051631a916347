"""A Reflexion agent: it answers, is told that it was wrong, reflects, and answers again.

In: a HotpotQA question that ships with the package. Out: each call's time to first token, what it
reused, what the model said. `--replay` gives the model recorded attempts and lets it try the last.
"""

from __future__ import annotations

import sys
from math import inf
from typing import Annotated

import typer
from langchain_core.runnables import RunnableConfig
from rich.console import Console

from cacheslide_agents.bench.demo import REFLECTIONS, demo_episode
from cacheslide_agents.bench.metrics import token_f1
from cacheslide_agents.bench.recordings import demo_recording
from cacheslide_agents.errors import CacheSlideError
from langchain_cacheslide import ChatCacheSlide
from langchain_cacheslide.agents import (
    Attempt,
    CallLog,
    ChainOfThought,
    Question,
    Replayed,
    printer,
    reflexion_graph,
    sum_line,
)


def main(
    question: Annotated[int, typer.Option(help="Which shipped question, from 0.")] = 0,
    model: Annotated[str, typer.Option(help="Alias, local folder or hub id.")] = "smollm2-135m",
    trials: Annotated[int, typer.Option(min=1, help="Attempts at most.")] = 3,
    replay: Annotated[bool, typer.Option("--replay", help="Recorded attempts.")] = False,
    reuse: Annotated[bool, typer.Option("--reuse/--no-reuse", help="Off: all dense.")] = True,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of each answer.")] = 48,
) -> None:
    """Play one episode."""
    episode, console = demo_episode(question), Console(emoji=False)
    asked = episode.question

    def f1(question: Question, attempt: Attempt, config: RunnableConfig) -> float:
        return token_f1(attempt.answer, [asked.answer])

    chat = ChatCacheSlide(model=model, reuse=reuse, max_tokens=max_tokens)
    recording = demo_recording(asked, REFLECTIONS, [asked.paragraphs[0].title] * len(REFLECTIONS))
    examples = [{"question": one.question, "answer": one.answer} for one in episode.examples]
    agent = reflexion_graph(
        ChainOfThought(Replayed(chat, recording.answers) if replay else chat, examples),
        f1,
        trials=recording.trials if replay else trials,
        enough=inf if replay else 1.0,
    )
    console.print(f"[bold]{asked.question}[/]  (gold: {asked.answer})")
    log = CallLog(printer(console))
    passages = [{"title": one.title, "text": one.text} for one in asked.paragraphs]
    done = agent.invoke(
        {"question": asked.question, "passages": passages},
        {"callbacks": [log], "configurable": {"thread_id": "episode"}},
    )
    for number, (attempt, score) in enumerate(
        zip(done["attempts"], done["scores"], strict=True), start=1
    ):
        console.print(f"trial {number}: F1 {score:.2f}  {attempt['answer']}", markup=False)
    console.print(sum_line(log.calls), highlight=False)


if __name__ == "__main__":
    try:
        typer.run(main)
    except CacheSlideError as error:
        sys.exit(f"error: {error}")
