"""Which studies have a table or a figure of their own, and who makes it; `FLAT` for the others.

In: a study's name. Out: its `StudyReport`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from cacheslide_agents.bench.answer_report import answer_points, answers_markdown, answers_table
from cacheslide_agents.bench.curve_plot import plot_curves
from cacheslide_agents.bench.episode_report import (
    episode_points,
    episodes_markdown,
    episodes_table,
    plot_episodes,
)
from cacheslide_agents.bench.flat_report import flat_json, flat_markdown, flat_table
from cacheslide_agents.bench.plots import plot_frontier

Study = Mapping[str, Any]
Plot = Callable[[Study, Path], None]


@dataclass(frozen=True, slots=True)
class StudyReport:
    """The views of a study's file: as JSON, a rich table, a Markdown table, and, where it has one,
    a figure."""

    json: Callable[[Study], Any]
    table: Callable[[Study], Table]
    markdown: Callable[[Study], str]
    plot: Plot | None = None

    @property
    def is_flat(self) -> bool:
        """Whether its table is that of any study."""
        return self.table is flat_table


FLAT = StudyReport(flat_json, flat_table, flat_markdown)
STUDY_REPORTS: Mapping[str, StudyReport] = {
    "answers": StudyReport(answer_points, answers_table, answers_markdown),
    "episodes": StudyReport(episode_points, episodes_table, episodes_markdown, plot_episodes),
    "frontier": replace(FLAT, plot=plot_frontier),
    "layers": replace(FLAT, plot=plot_curves),
    "padding": replace(FLAT, plot=plot_curves),
    "pmkd": replace(FLAT, plot=plot_curves),
}
