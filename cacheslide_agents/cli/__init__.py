"""The command line, `cacheslide`.

In: arguments. Out: answers and JSON on stdout, everything else on stderr, an exit code.
"""

from __future__ import annotations

import typer

from cacheslide_agents.cli.bench import bench
from cacheslide_agents.cli.chat import chat
from cacheslide_agents.cli.check import check
from cacheslide_agents.cli.console import Commands
from cacheslide_agents.cli.demo import demo
from cacheslide_agents.cli.generate import generate
from cacheslide_agents.cli.inspect import inspect
from cacheslide_agents.cli.report import report

app = typer.Typer(
    cls=Commands,
    name="cacheslide",
    help="Reuse the KV cache of prompt chunks that moved.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
for command in (chat, generate, inspect, check, bench, report, demo):
    app.command()(command)


def main() -> None:
    """Run the command line of this process."""
    app()
