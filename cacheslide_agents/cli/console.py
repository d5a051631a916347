"""How every command ends, and where its words go.

In: a running command. Out: answers and JSON on stdout, everything else on stderr, and an exit code:
0 done, 1 the thing checked does not hold, 2 usage or bad input, 130 interrupted, 141 broken pipe.
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.status import Status
from rich.text import Text
from typer.core import TyperGroup

from cacheslide_agents.cli.exit_codes import BAD_INPUT, BROKEN_PIPE, INTERRUPTED
from cacheslide_agents.errors import CacheSlideError, DataError

FILE_WIDTH = 200
_LITERAL: dict[str, Any] = {"highlight": False, "markup": False, "emoji": False}
"""What prompts, models and files hold is shown as it is."""


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
    return _Console(stderr=True, soft_wrap=True, **_LITERAL)


def screen() -> Console:
    """Where tables go: stdout, wide when there is no terminal to fit them into."""
    width = None if sys.stdout.isatty() else FILE_WIDTH
    return _Console(width=width, **_LITERAL)


def waiting(doing: str) -> Status:
    """A sign of life on stderr for the length of a block. What it says is shown as it is."""
    return notes().status(Text(doing))


@contextmanager
def bar(
    label: str, *columns: ProgressColumn, total: int | None = None, shown: bool = True
) -> Iterator[Callable[..., None]]:
    """A bar on stderr, gone at the end of the block, where it is `shown` and a terminal is there.

    Yields what moves it, in rich's words: `completed=`, `total=`, `description=`.
    """
    console = notes()
    hidden = not (shown and console.is_terminal)
    all_columns = (description(), BarColumn(), *columns, TimeRemainingColumn())
    with Progress(*all_columns, console=console, disable=hidden, transient=True) as progress:
        yield partial(progress.update, progress.add_task(label, total=total))


def description() -> ProgressColumn:
    """The column of a bar that says what is done; a task's name in it is shown as it is."""
    return TextColumn("{task.description}", markup=False)


def emit(value: Any) -> None:
    """Write `value` to stdout as JSON; `DataError`, and nothing written, if it is none."""
    spelled = "utf" in (sys.stdout.encoding or "utf").lower()
    try:
        text = json.dumps(value, ensure_ascii=not spelled, indent=1, allow_nan=False)
    except ValueError as error:
        raise DataError(
            f"a figure is not finite, which JSON cannot say ({error}); leave out --json to see it"
        ) from error
    sys.stdout.write(f"{text}\n")
