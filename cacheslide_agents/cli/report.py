"""`cacheslide report`: an earlier run as a table, a page or a figure.

In: a JSON file of `cacheslide bench`. Out: a table or Markdown on stdout, or an image file.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cacheslide_agents.cli import options
from cacheslide_agents.cli.console import emit, notes, screen
from cacheslide_agents.errors import DataError, RequestError

if TYPE_CHECKING:
    from cacheslide_agents.bench.study_reports import StudyReport


def report(
    results: Annotated[Path, typer.Argument(help="JSON written by `cacheslide bench`.")],
    page: Annotated[bool, typer.Option("--page", help="Markdown with what it means.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw a study into this file.")] = None,
    as_json: options.Json = False,
) -> None:
    """Show an earlier run."""
    from cacheslide_agents.bench import markdown, plot_frontier, read_results, table
    from cacheslide_agents.bench.curve_plot import plot_curves
    from cacheslide_agents.bench.episode_report import plot_episodes
    from cacheslide_agents.bench.results import read_json
    from cacheslide_agents.bench.study_reports import FLAT, STUDY_REPORTS

    if page and (as_json or plot):
        raise RequestError("--page stands alone: leave out --json and --plot")
    study = read_json(results)
    if plot is not None:
        draw = plot_episodes if study.get("study") == "episodes" else plot_frontier
        try:
            (plot_curves if "curves" in study else draw)(study, plot)
        except (OSError, ValueError) as error:
            raise DataError(f"{plot} cannot be drawn: {error}") from error
        if as_json:
            emit({"plot": str(plot)})
        else:
            notes().print(f"written to {plot}")
        return
    if not isinstance(name := study.get("study", ""), str):
        raise DataError(f"{results}: 'study' is a {type(name).__name__}; it must be a name")
    if name:
        _study(STUDY_REPORTS.get(name, FLAT), study, page=page, as_json=as_json)
        return
    found = read_results(results)
    if not found.rows:
        raise DataError(f"{results} holds no rows; was the run ended before its first turn?")
    if as_json:
        emit({name: asdict(one) for name, one in found.summary.items()})
    elif page:
        print(markdown(found))
    else:
        screen().print(table(found))


def _study(shown: StudyReport, study: dict[str, Any], *, page: bool, as_json: bool) -> None:
    if as_json:
        emit(shown.json(study))
    elif page:
        print(shown.markdown(study), end="")
    else:
        screen().print(shown.table(study))
