"""A MemGPT-style companion: it writes down what it is told and looks up what it cannot see.

In: a short conversation that ships with the package, or what you type (`--talk`). Out: each call's
time to first token, what it reused, the reply, and the memory at the end. `--replay` gives the
model recorded function calls, so that its memory is well kept although the model is small.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Annotated

import typer
from rich.console import Console
from rich.prompt import Prompt

from cacheslide_agents.bench.small_dialogue import ARCHIVE, GOLD, HUMAN, KEPT, PERSONA, SAYS
from cacheslide_agents.errors import CacheSlideError
from langchain_cacheslide import ChatCacheSlide
from langchain_cacheslide.agents import CallLog, Companion, Replayed, printer, sum_line


def main(
    model: Annotated[str, typer.Option(help="Alias, local folder or hub id.")] = "smollm2-135m",
    turns: Annotated[int, typer.Option(min=1, help="Messages of the conversation.")] = len(SAYS),
    replay: Annotated[bool, typer.Option("--replay", help="Recorded function calls.")] = False,
    talk: Annotated[bool, typer.Option("--talk", help="You speak; an empty line ends.")] = False,
    reuse: Annotated[bool, typer.Option("--reuse/--no-reuse", help="Off: all dense.")] = True,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of each answer.")] = 96,
) -> None:
    """Hold one conversation."""
    if replay and talk:
        raise typer.BadParameter("--replay has its own conversation; leave out --talk")
    console = Console(emoji=False)
    chat = ChatCacheSlide(model=model, reuse=reuse, max_tokens=max_tokens)
    companion = Companion(
        Replayed(chat, KEPT) if replay else chat,
        persona=PERSONA,
        human=HUMAN,
        archive=ARCHIVE,
        steps=2 if replay else 3,
    )
    log = CallLog(printer(console))
    for said in typed() if talk else SAYS[:turns]:
        console.print(f"[bold blue]you[/]      {said}", highlight=False)
        reply = companion.say(said, {"callbacks": [log], "configurable": {"thread_id": "talk"}})
        console.print(f"[bold magenta]it[/]       {reply}", highlight=False)
    if not talk and turns >= len(SAYS):
        console.print(f"(the last reply should say: {GOLD})", markup=False)
    memory = companion.memory({"configurable": {"thread_id": "talk"}})
    console.print("[bold]what it remembers of you[/]")
    console.print(memory["human"], markup=False, highlight=False)
    console.print(sum_line(log.calls), highlight=False)


def typed() -> Iterator[str]:
    while said := Prompt.ask("[bold blue]you[/]", default="", show_default=False):
        yield said


if __name__ == "__main__":
    try:
        typer.run(main)
    except CacheSlideError as error:
        sys.exit(f"error: {error}")
