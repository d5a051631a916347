"""A SWE-agent-style loop that mends a small repository, in a bounded shell.

In: a repository of three files with one bug, made in a temporary folder. Out: each call's time to
first token, what it reused, what was run, and whether the repository's test passes then.
`--replay` gives the model recorded answers, whose commands are really run.
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from rich.console import Console

from cacheslide_agents.bench.small_repository import ISSUE, MENDED, TEST, write_repository
from cacheslide_agents.errors import CacheSlideError
from langchain_cacheslide import ChatCacheSlide
from langchain_cacheslide.agents import CallLog, Replayed, Shell, printer, sum_line, swe_graph


def main(
    model: Annotated[str, typer.Option(help="Alias, local folder or hub id.")] = "smollm2-135m",
    steps: Annotated[int, typer.Option(min=1, help="Commands at most.")] = 10,
    replay: Annotated[bool, typer.Option("--replay", help="Recorded answers.")] = False,
    reuse: Annotated[bool, typer.Option("--reuse/--no-reuse", help="Off: all dense.")] = True,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of each answer.")] = 64,
) -> None:
    """Solve one issue."""
    console = Console(emoji=False)
    chat = ChatCacheSlide(model=model, reuse=reuse, max_tokens=max_tokens)
    with TemporaryDirectory(prefix="cacheslide-swe-") as folder:
        shell = Shell(write_repository(Path(folder)))
        console.print(f"[bold]{ISSUE.splitlines()[0]}[/]  (shell: {shell.confinement})")
        agent = swe_graph(
            Replayed(chat, MENDED) if replay else chat,
            shell,
            test=TEST,
            keep_observations=3,  # fewer than usual, so that a short episode elides some
            steps=max(steps, len(MENDED)) if replay else steps,
        )
        log = CallLog(printer(console))
        done = agent.invoke(
            {"issue": ISSUE}, {"callbacks": [log], "configurable": {"thread_id": "issue"}}
        )
        for entry in done["history"]:
            console.rule(entry["role"], align="left", style="dim")
            console.print(entry["text"], markup=False, highlight=False)
        console.rule(TEST, align="left")
        console.print(done["report"], markup=False, highlight=False)
        verdict = "[green]passes[/]" if done["passed"] else "[red]still fails[/]"
        console.print(f"[bold]The repository's test {verdict}.[/]")
        console.print(sum_line(log.calls), highlight=False)


if __name__ == "__main__":
    try:
        typer.run(main)
    except CacheSlideError as error:
        sys.exit(f"error: {error}")
