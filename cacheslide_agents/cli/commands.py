"""Every command of the command line, `cacheslide`, under one roof.

In: arguments. Out: answers and JSON on stdout, everything else on stderr, an exit code.
"""

from __future__ import annotations

from importlib.metadata import version as version_of
from typing import Annotated

import typer

from cacheslide_agents.cli import (
    bench,
    cache,
    calibrate,
    chat,
    check,
    demo,
    generate,
    inspect,
    record,
    replay,
    report,
    serve,
    train,
    why,
)
from cacheslide_agents.cli.console import Commands

app = typer.Typer(
    cls=Commands,
    name="cacheslide",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command()(chat.chat)
app.command()(generate.generate)
app.command()(inspect.inspect)
app.command()(why.why)
app.command()(check.check)
app.command()(bench.bench)
app.command()(replay.replay)
app.command()(report.report)
app.command()(demo.demo)
app.command()(record.record)
app.command()(train.train)
app.command()(calibrate.calibrate)
app.command(context_settings=serve.FOREIGN_FLAGS)(serve.serve)
app.add_typer(cache.app)


def _show_version(wanted: bool) -> None:
    if wanted:
        print("cacheslide-agents", version_of("cacheslide-agents"))
        raise typer.Exit


@app.callback()
def cacheslide(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Say which it is."),
    ] = False,
) -> None:
    """Reuse the KV cache of prompt chunks that moved."""
