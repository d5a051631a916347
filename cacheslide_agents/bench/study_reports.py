"""Which studies have a table of their own, and who makes it; `FLAT` for the others.

In: a study's name. Out: its `StudyReport`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from cacheslide_agents.bench.answer_report import answer_points, answers_markdown, answers_table
from cacheslide_agents.bench.episode_report import (
    episode_points,
    episodes_markdown,
    episodes_table,
)
from cacheslide_agents.bench.flat_report import flat_json, flat_markdown, flat_table

Study = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class StudyReport:
    """Three views of a study's file: as JSON, a rich table, a Markdown table."""

    json: Callable[[Study], Any]
    table: Callable[[Study], Table]
    markdown: Callable[[Study], str]


FLAT = StudyReport(flat_json, flat_table, flat_markdown)
STUDY_REPORTS: Mapping[str, StudyReport] = {
    "answers": StudyReport(answer_points, answers_table, answers_markdown),
    "episodes": StudyReport(episode_points, episodes_table, episodes_markdown),
}
