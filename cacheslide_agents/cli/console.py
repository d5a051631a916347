"""How every command ends, and where its words go.

In: a running command. Out: answers and JSON on stdout, everything else on stderr, and an exit code:
0 done, 1 the thing checked does not hold, 2 usage or bad input, 130 interrupted, 141 broken pipe.
"""

from __future__ import annotations

import io
import json
import os
import sys
from typing import Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from cacheslide_agents.cli.exit_codes import BAD_INPUT, BROKEN_PIPE, INTERRUPTED
from cacheslide_agents.errors import CacheSlideError

FILE_WIDTH = 200


class Commands(TyperGroup):
    """Turns the errors a user can meet into one line and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            value = super().invoke(ctx)
            sys.stdout.flush()
            return value
        except CacheSlideError as error:
            complain(error)
            raise typer.Exit(BAD_INPUT) from error
        except KeyboardInterrupt as error:
            print(file=sys.stderr)
            raise typer.Exit(INTERRUPTED) from error
        except BrokenPipeError as error:
            _silence_stdout()
            raise typer.Exit(BROKEN_PIPE) from error
        except OSError as error:  # a full disk, say
            complain(error)
            _silence_stdout()
            raise typer.Exit(BAD_INPUT) from error


def _silence_stdout() -> None:
    """Python flushes stdout once more at exit, which would complain again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def open_streams() -> None:
    """Make stdout and stderr take anything: characters they cannot spell are written as escapes,
    and where the caller closed one, what is written to it is dropped.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def complain(error: Exception) -> None:
    """One line on stderr, whatever the message holds."""
    print("error:", " ".join(str(error).split()), file=sys.stderr)


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """rich would end the process with 1, which says that something does not hold."""
        raise BrokenPipeError


def notes() -> Console:
    """Where progress, receipts and remarks go: stderr."""
    return _Console(stderr=True, highlight=False, markup=False, soft_wrap=True)


def screen() -> Console:
    """Where tables go: stdout, wide when there is no terminal to fit them into."""
    width = None if sys.stdout.isatty() else FILE_WIDTH
    return _Console(highlight=False, markup=False, width=width)


def emit(value: Any) -> None:
    """Write `value` to stdout as JSON."""
    spelled = "utf" in (sys.stdout.encoding or "utf").lower()
    json.dump(value, sys.stdout, ensure_ascii=not spelled, indent=1)
    sys.stdout.write("\n")
