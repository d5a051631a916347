"""`cacheslide report` of studies without a table of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from cacheslide_agents.cli.commands import app

POINTS = [
    {"tokens": 1000, "policy": "prefix", "ttft_s": 4.94400874, "kl_mean": None},
    {"tokens": 8000, "policy": "cacheslide", "ttft_s": 5.0, "kl_mean": 6.248e-05},
]


def report(tmp_path: Path, found: dict[str, Any], *options: str) -> Result:
    path = tmp_path / "study.json"
    path.write_text(json.dumps({"schema": 1, "model": "m", **found}))
    return CliRunner().invoke(app, ["report", str(path), *options])


def test_every_point_is_a_line_and_every_figure_a_column(tmp_path: Path) -> None:
    found = {"study": "length", "points": POINTS}
    assert report(tmp_path, found, "--page").stdout.splitlines() == [
        "| tokens | policy | ttft_s | kl_mean |",
        "| --- | --- | --- | --- |",
        "| 1000 | prefix | 4.944 | - |",
        "| 8000 | cacheslide | 5 | 6.248e-05 |",
    ]
    assert json.loads(report(tmp_path, found, "--json").stdout) == POINTS
    assert "6.248e-05" in report(tmp_path, found).stdout


def test_objects_by_policy_are_points_and_many_figures_go_down(tmp_path: Path) -> None:
    figures = {f"f{number}": number for number in range(9)}
    found = {
        "study": "stale",
        "recompute": {**figures, "by": {"old": 0.25}},
        "prefix": {**figures, "by": {"old": 0.5, "new": 1}},
        "cases": [{"id": "a"}],
    }
    assert report(tmp_path, found, "--page").stdout.splitlines() == [
        "| policy | recompute | prefix |",
        "| --- | --- | --- |",
        *(f"| f{number} | {number} | {number} |" for number in range(9)),
        "| by.old | 0.25 | 0.5 |",
        "| by.new | - | 1 |",
    ]


def test_a_study_of_curves_is_its_own_json(tmp_path: Path) -> None:
    found = {"study": "pmkd", "curves": {"rope": [[0, 1.0]]}}
    assert json.loads(report(tmp_path, found, "--json").stdout)["curves"] == found["curves"]
    assert "draw it with --plot" in report(tmp_path, found).stderr


@pytest.mark.parametrize("found", [{"study": "length", "points": POINTS}, {"rows": []}])
def test_a_file_that_cannot_be_drawn_says_which_can(tmp_path: Path, found: dict[str, Any]) -> None:
    figure = tmp_path / "figure.svg"
    result = report(tmp_path, found, "--plot", str(figure))
    assert result.exit_code == 2 and not figure.exists()
    told = "study.json has no figure; --plot draws studies of episodes, frontier, layers, padding, "
    assert told in result.stderr


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({"study": "pressure", "turns": 20, "runs": []}, "'pressure' has no table"),
        ({"study": "length", "points": []}, "'length' has no table"),
        ({"study": "length", "points": [1]}, "points[0] is a int"),
        ({"study": "length", "points": [{"a": 1}, {"b": 1}]}, "points[1] has other figures"),
    ],
)
def test_a_file_without_points_is_one_line_on_stderr(
    tmp_path: Path, found: dict[str, Any], message: str
) -> None:
    result = report(tmp_path, found)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
