"""The JSON of a run: what is written is what is read, and nothing else passes for it."""

import json
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cacheslide_agents.bench.report import markdown, table
from cacheslide_agents.bench.results import Results, Row, read_results, write_json
from cacheslide_agents.bench.summary import summarise
from cacheslide_agents.errors import DataError
from cacheslide_agents.policies import POLICY_NAMES

DENSE = Row(
    id="q1",
    turn=2,
    policy="recompute",
    prompt_tokens=1500,
    first_change=120,
    reused_tokens=0,
    active_tokens=1500,
    compute_fraction=1.0,
    populate_s=0.0,
    ttft_s=4.0,
    kl=0.0,
    top1=1.0,
    answer="1988",
    f1=1.0,
    em=1.0,
    outcome="cold",
    reason="",
    bytes_written=0,
    peak_kv_bytes=1 << 20,
)
SLIDE = replace(
    DENSE, policy="cacheslide", ttft_s=0.5, kl=0.0021, compute_fraction=0.112, outcome="hit"
)


@pytest.fixture
def results() -> Results:
    rows = (DENSE, SLIDE)
    versions = {"python": "3.11.7", "torch": "2.13.0"}
    return Results("reflexion", "m", "torch", "cpu", 2, versions, rows, summarise(rows))


def test_a_written_file_reads_back_as_the_same_results(results: Results, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "results.json"
    write_json(path, results.to_dict())
    assert read_results(path) == results
    assert [entry.name for entry in path.parent.iterdir()] == ["results.json"]


def test_the_file_has_exactly_the_keys_of_schema_1(results: Results) -> None:
    found = results.to_dict()
    assert found["schema"] == 1
    assert set(found) == {
        *("schema", "task", "model", "backend", "device", "threads", "versions"),
        *("rows", "summary"),
    }
    assert set(found["rows"][0]) == {
        *("id", "turn", "policy", "prompt_tokens", "first_change", "reused_tokens"),
        *("active_tokens", "compute_fraction", "populate_s", "ttft_s", "kl", "top1", "answer"),
        *("f1", "em", "outcome", "reason", "bytes_written", "peak_kv_bytes"),
    }
    assert set(found["summary"]["cacheslide"]) == {
        *("ttft_speedup_vs_recompute", "ttft_speedup_vs_prefix", "ttft_speedup_hits_only"),
        *("compute_fraction", "kl_mean", "kl_p95", "top1", "f1", "em", "hit_rate", "rows_hit"),
        *("fallbacks", "declined"),
    }
    assert found["summary"]["cacheslide"]["ttft_speedup_vs_recompute"] == {
        "median": 8.0,
        "min": 8.0,
        "max": 8.0,
    }


def test_a_failed_write_leaves_the_last_file_alone(results: Results, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    write_json(path, results.to_dict())
    with pytest.raises(DataError, match="not JSON compliant"):
        write_json(path, {"schema": float("nan")})
    assert read_results(path) == results


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda found: found.update(schema=2), "not a benchmark result of schema 1"),
        (lambda found: found.update(study="frontier"), "not a benchmark result"),
        (lambda found: found["rows"][1].pop("kl"), r"rows\[1\]: 'kl' is missing"),
        (lambda found: found["rows"][0].update(kl="0"), r"rows\[0\]: 'kl' cannot be '0'"),
        (lambda found: found["rows"][0].update(turn=True), r"'turn' cannot be True"),
        (lambda found: found["rows"].append([]), r"rows\[2\] must be an object, not list"),
        (lambda found: found.update(extra=1), "'extra' is unknown"),
        (lambda found: found.update(rows={}), "'rows' must be a list"),
        (lambda found: found["summary"].update(x={}), "x: .* is missing"),
    ],
)
def test_a_file_off_the_schema_is_refused_with_the_place(
    results: Results, tmp_path: Path, damage: Callable[[dict[str, Any]], None], message: str
) -> None:
    found = json.loads(json.dumps(results.to_dict()))
    damage(found)
    path = tmp_path / "results.json"
    path.write_text(json.dumps(found), encoding="utf-8")
    with pytest.raises(DataError, match=message):
        read_results(path)


@pytest.mark.parametrize("text", [None, "{", "[]"])
def test_a_missing_or_broken_file_is_a_data_error(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "results.json"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=r"results\.json"):
        read_results(path)


def test_the_page_shows_the_headline(results: Results) -> None:
    page = markdown(results)
    assert "# reflexion on m" in page
    assert "1 turns, torch backend, device cpu, 2 threads; python 3.11.7, torch 2.13.0." in page
    line = next(line for line in page.splitlines() if line.startswith("| cacheslide |"))
    assert line == (
        "| cacheslide | 0.500 | 8.00 (8.00 to 8.00) | - | 8.00 (8.00 to 8.00) | 0.112 | 0.0021 "
        "| 0.0021 | 1.00 | 1.00 | 1.00 | 0.00 | 1 / 0 / 0 |"
    )


def test_the_table_of_nine_policies_fits_a_terminal(results: Results) -> None:
    rows = tuple(replace(SLIDE, policy=name) for name in POLICY_NAMES)
    screen = Console(width=80, record=True, file=StringIO())
    screen.print(table(replace(results, rows=rows, summary=summarise(rows))))
    lines = screen.export_text().splitlines()
    for name in POLICY_NAMES:
        (line,) = (line for line in lines if line.split()[:1] == [name])
        assert line.split()[1:] == [
            *("0.50", "1.00", "1.00", "0.112", "0.0021", "1.00", "1", "0", "0")
        ]
