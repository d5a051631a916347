"""The figures on pages are those of the JSON files beside them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cacheslide_agents.cli.commands import app

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"
REPORTED = ("answers", "append", "episodes", "length", "memgpt", "reflexion", "swe_agent")
"""Pages that hold the table of `cacheslide report`."""
CHOSEN = ("frontier", "stale")
"""Pages that choose among their file's figures."""
WORKLOADS = ("reflexion", "memgpt", "swe_agent")
PEERS = {
    "prefix": "exact prefix (vLLM APC, ContextCache)",
    "prompt_cache": "Prompt Cache",
    "cache_blend": "CacheBlend 18 %",
    "epic": "EPIC 64",
    "cache_blend_context": "CacheBlend 18 %, in context",
    "epic_context": "EPIC 64, in context",
    "cacheslide_paper": "CacheSlide as printed (WCA)",
    "cacheslide": "**CacheSlide, ours**",
}
Variant = tuple[str, str, str, float | None]
VARIANTS: dict[str, tuple[str, str, float | None]] = {
    "**`CacheSlide()`**, affinity 3 %": ("cacheslide", "default", 0.03),
    "the same, affinity 0 %": ("cacheslide", "default", 0.0),
    "the same, affinity 10 %": ("cacheslide", "default", 0.1),
    "affinity 3 % + boundary 16": ("cacheslide", "affinity+boundary16", 0.03),
    "affinity 10 % + boundary 64": ("cacheslide", "affinity+boundary64", 0.1),
    "mid-model key cosine 5 % + boundary 16": ("cacheslide", "key_cosine+boundary16", 0.05),
    "key deviation 10 %, our fusion": ("cacheslide", "key_deviation", 0.1),
    "key deviation 26 %, the paper's fusion and gate": (
        "cacheslide_paper",
        "key_deviation, paper fusion, literal gate",
        0.26,
    ),
    "CacheBlend 18 %, in context": ("cache_blend_context", "key_deviation", 0.18),
    "CacheBlend 18 %": ("cache_blend", "key_deviation", 0.18),
    "EPIC 32, in context": ("epic_context", "boundary32", None),
    "EPIC 64, in context": ("epic_context", "boundary64", None),
    "EPIC 64": ("epic", "boundary64", None),
    "oracle of deviations, 5 %": ("cacheslide", "oracle", 0.05),
    "oracle of deviations, 10 %": ("cacheslide", "oracle", 0.1),
}


def found(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text("utf-8"))


def rows(page: Path, first: str = "") -> list[list[str]]:
    """The cells of a page's table rows whose first cell begins so."""
    lines = [line for line in page.read_text("utf-8").splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    return [row for row in cells if row[0].startswith(first)]


def spread(ratios: dict[str, float]) -> str:
    """As the README gives it: two digits where a ratio is about 1."""
    digits = 1 if ratios["median"] >= 2 else 2
    median, least, most = (f"{ratios[name]:.{digits}f}" for name in ("median", "min", "max"))
    return f"{median}x ({least} to {most})"


def headline(name: str) -> list[str]:
    """Of `cacheslide`: both ratios, compute, KL, top-1."""
    one = found(name)["summary"]["cacheslide"]
    return [
        spread(one["ttft_speedup_vs_recompute"]),
        spread(one["ttft_speedup_vs_prefix"]),
        f"{one['compute_fraction']:.1%}".replace("%", " %"),
        f"{one['kl_mean']:.4f} / {one['kl_p95']:.4f}",
        f"{one['top1']:.2f}",
    ]


def points() -> Iterator[tuple[Variant, dict[str, Any]]]:
    """By task, policy, selector and fraction."""
    for point in found("frontier")["points"]:
        yield (point["task"], point["policy"], point["selector"], point["fraction"]), point


def test_every_page_of_a_file_is_compared_with_it() -> None:
    pages = {page.stem for page in RESULTS.glob("*.md")}
    assert {page for page in pages if (RESULTS / f"{page}.json").exists()} == {*REPORTED, *CHOSEN}


@pytest.mark.parametrize("name", REPORTED)
def test_page_holds_the_reported_table(name: str) -> None:
    told = CliRunner().invoke(app, ["report", str(RESULTS / f"{name}.json"), "--page"])
    assert told.exit_code == 0
    table = re.findall(r"^\|.*\|$", told.stdout, re.MULTILINE)
    assert len(table) > 2
    assert "\n".join(table) in (RESULTS / f"{name}.md").read_text("utf-8")


@pytest.mark.parametrize("name", [*WORKLOADS, "append"])
def test_readme_row_holds_the_files_figures(name: str) -> None:
    (row,) = rows(ROOT / "README.md", f"[`{name}`]")
    assert row[1:6] == headline(name)


@pytest.mark.parametrize("name", WORKLOADS)
def test_row_of_vllm_holds_the_files_figures(name: str) -> None:
    (row,) = rows(RESULTS / "vllm.md", f"`{name}`")
    assert row[2:] == headline(f"vllm_{name}")


@pytest.mark.parametrize("name", WORKLOADS)
def test_peers_rows_hold_the_files_figures(name: str) -> None:
    page = RESULTS / "peers.md"
    part = page.read_text("utf-8").partition(f"## {name}:")[2].partition("##")[0]
    for policy, one in found(name)["summary"].items():
        if policy == "recompute":
            continue
        figures = [
            f"{one['ttft_speedup_vs_recompute']['median']:.1f}x",
            f"{one['ttft_speedup_vs_prefix']['median']:.1f}x",
            f"{one['compute_fraction']:.1%}".replace("%", " %"),
            f"{one['kl_mean']:.5f}",
            f"{one['kl_p95']:.4f}",
            f"{one['top1']:.2f}",
        ]
        assert f"| {PEERS[policy]} | {' | '.join(figures)} |" in part


@pytest.mark.parametrize("choice", VARIANTS)
def test_frontier_row_holds_the_files_figures(choice: str) -> None:
    known = dict(points())
    shown = [known[task, *VARIANTS[choice]] for task in WORKLOADS]
    figures = [f"{one['kl_mean']:.5f} / {one['compute_fraction']:.1%}" for one in shown]
    expected = [choice, *(each.replace("%", " %") for each in figures)]
    assert expected in rows(RESULTS / "frontier.md")


def test_frontier_rows_are_all_compared() -> None:
    assert [row[0] for row in rows(RESULTS / "frontier.md")][2:] == list(VARIANTS)


def test_stale_rows_hold_the_files_figures() -> None:
    shown = rows(RESULTS / "stale.md", "`")
    expected = [
        [
            f"{one['old']:.2f}",
            *(f"{one['by_history'][kind]['old']:.2f}" for kind in ("neutral", "old", "new")),
            f"{one['same_as_dense']:.2f}",
            f"{one['greedy_new']:.2f} / {one['greedy_old']:.2f}",
        ]
        for one in found("stale").values()
        if isinstance(one, dict)
    ]
    assert [row[1:] for row in shown] == expected


def test_readme_tells_of_vllm_what_its_files_hold() -> None:
    (row,) = rows(ROOT / "README.md", "Inside vLLM")
    first, second, third = (headline(f"vllm_{name}")[0] for name in WORKLOADS)
    assert f"{first}, {second} and {third}" in row[1]


def test_readme_answers_are_the_files() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    for point in found("answers")["points"]:
        low, high = f"{point['f1_low']:.3f}", f"{point['f1_high']:+.3f}"
        assert f"{point['f1_difference']:+.3f}" in readme
        assert f"{low} to {high.removeprefix('+') if point['f1_high'] < 0 else high}" in readme


def test_readme_episodes_and_lengths_are_the_files() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    ours: dict[tuple[str, str], float] = {}
    cached: dict[tuple[str, str], float] = {}
    for point in found("episodes")["points"]:
        into = {"cacheslide": ours, "prefix": cached}.get(point["policy"], {})
        into[point["agent"], point["mode"]] = point["wall_speedup"]
    against = [ours[key] / cached[key] for key in ours]
    assert f"{min(ours.values()):.1f} to {max(ours.values()):.1f} times as fast" in readme
    assert f"{min(against):.1f} to {max(against):.1f} times as with prefix caching" in readme
    speedups = [
        point["ttft_speedup_vs_recompute"]
        for point in found("length")["points"]
        if point["policy"] == "cacheslide"
    ]
    assert f"{min(speedups):.1f} to {max(speedups):.1f} times sooner" in readme
