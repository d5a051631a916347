"""`cacheslide report`: an earlier run as a table, a page or a figure.

In: a JSON file of `cacheslide bench`. Out: a table or Markdown on stdout, or an image file.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cacheslide_agents.cli import options
from cacheslide_agents.cli.console import emit, notes, screen
from cacheslide_agents.errors import DataError, RequestError

if TYPE_CHECKING:
    from cacheslide_agents.bench.results import Results
    from cacheslide_agents.bench.study_reports import Plot, Study, StudyReport


def report(
    results: Annotated[Path, typer.Argument(help="JSON written by `cacheslide bench`.")],
    page: Annotated[bool, typer.Option("--page", help="Markdown with what it means.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw a study into this file.")] = None,
    as_json: options.Json = False,
) -> None:
    """Show an earlier run."""
    from cacheslide_agents.bench.results import read_json, results_of
    from cacheslide_agents.bench.study_reports import FLAT, STUDY_REPORTS

    if page and (as_json or plot):
        raise RequestError("--page stands alone: leave out --json and --plot")
    read = read_json(results)
    if not isinstance(name := read.get("study", ""), str):
        raise DataError(f"{results}: 'study' is a {type(name).__name__}; it must be a name")
    shown = STUDY_REPORTS.get(name, FLAT)
    if plot is not None:
        if shown.plot is None:
            drawn = ", ".join(each for each, one in STUDY_REPORTS.items() if one.plot is not None)
            raise DataError(f"{results} has no figure; --plot draws studies of {drawn}")
        _draw(shown.plot, read, plot, as_json=as_json)
    elif name:
        _study(shown, read, page=page, as_json=as_json)
    else:
        _results(results_of(read, str(results)), results, page=page, as_json=as_json)


def _draw(draw: Plot, study: Study, place: Path, *, as_json: bool) -> None:
    try:
        draw(study, place)
    except (OSError, ValueError) as error:
        raise DataError(f"{place} cannot be drawn: {error}") from error
    if as_json:
        emit({"plot": str(place)})
    else:
        notes().print(f"written to {place}")


def _study(shown: StudyReport, study: Study, *, page: bool, as_json: bool) -> None:
    if as_json:
        emit(shown.json(study))
    elif page:
        print(shown.markdown(study), end="")
    else:
        screen().print(shown.table(study))


def _results(found: Results, path: Path, *, page: bool, as_json: bool) -> None:
    from cacheslide_agents.bench import markdown, table

    if not found.rows:
        raise DataError(f"{path} holds no rows; was the run ended before its first turn?")
    if as_json:
        emit({name: asdict(one) for name, one in found.summary.items()})
    elif page:
        print(markdown(found))
    else:
        screen().print(table(found))
