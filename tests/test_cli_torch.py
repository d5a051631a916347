"""The command line on the torch backend, with a small model of random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from typer.testing import CliRunner, Result

from cacheslide_agents.cli.commands import app
from cacheslide_agents.position.rotary import Rotary


@pytest.fixture
def run(tiny_model: str) -> Any:
    def run(*arguments: str) -> Result:
        return CliRunner().invoke(app, [*arguments, "--model", tiny_model])

    return run


# Random weights are no smooth function of their context: only what must be exact is judged here.
LENIENT = ("--max-kl", "100")


def test_check_holds(run: Any) -> None:
    result = run("check", "--json", *LENIENT)
    assert result.exit_code == 0, result.output
    same, again, moved = json.loads(result.stdout)["findings"]
    assert same["reused_tokens"] == same["prompt_tokens"] - 1
    assert same["kl"] < 1e-9
    assert again["kl"] < 1e-9
    assert again["reused_tokens"] < moved["reused_tokens"] < moved["prompt_tokens"]
    assert result.stderr == ""


def test_check_fails_when_reused_keys_stand_a_few_places_off(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Rotary.rotate

    def off(self: Rotary, keys: Tensor, cos: Tensor, sin: Tensor, **options: Any) -> Tensor:
        return honest(self, keys, cos.roll(5, dims=-2), sin.roll(5, dims=-2), **options)

    monkeypatch.setattr(Rotary, "rotate", off)
    result = run("check", *LENIENT)
    assert result.exit_code == 1
    same, again, _ = result.stdout.splitlines()
    assert same.startswith("FAIL unchanged prompt equals dense: KL to dense is")
    assert again.startswith("FAIL moved prompt, all recomputed, equals dense: KL to dense is")


def test_demo_reuses_from_the_second_trial_on(run: Any) -> None:
    result = run("demo", "--json", "--max-tokens", "3")
    assert result.exit_code == 0, result.output
    trials = json.loads(result.stdout)["trials"]
    receipts = [trial["reuse"]["receipt"] for trial in trials]
    assert [receipt["outcome"] for receipt in receipts] == ["cold", "hit", "hit"]
    assert {trial["dense"]["receipt"]["compute_fraction"] for trial in trials} == {1.0}
    assert receipts[1]["compute_fraction"] < 0.25


def test_inspect_counts_the_tokens_that_would_be_sent(
    run: Any, smollm2_tokenizer: Any, tmp_path: Path
) -> None:
    source = '{% message "user" %}{% reuse "text" %}{{ text }}{% endreuse %}{% endmessage %}'
    template, values = tmp_path / "t.jinja", tmp_path / "v.json"
    template.write_text(source, encoding="utf-8")
    values.write_text('{"text": "The sky is blue."}', encoding="utf-8")
    found = json.loads(run("inspect", str(template), "--values", str(values), "--json").stdout)
    expected = smollm2_tokenizer.apply_chat_template(
        [{"role": "user", "content": "The sky is blue."}],
        add_generation_prompt=True,
        return_dict=False,
    )
    assert found["prompt_tokens"] == len(expected)
    assert sum(chunk["tokens"] for chunk in found["chunks"]) == len(expected)
    assert [chunk["id"] for chunk in found["chunks"]] == ["text", "generation-prompt"]


def test_bench_writes_the_file_that_report_reads(run: Any, data_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    arguments = ("--task", "reflexion", "--data", str(data_dir), "--out", str(out))
    result = run("bench", *arguments, "--policies", "prefix,cacheslide", "--limit", "1", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == json.loads(out.read_text(encoding="utf-8"))
    page = CliRunner().invoke(app, ["report", str(out), "--page"])
    assert [line.split()[1] for line in page.stdout.splitlines() if line.startswith("| ")] == [
        "policy",
        "---",
        "recompute",
        "prefix",
        "cacheslide",
    ]
    summary = CliRunner().invoke(app, ["report", str(out), "--json"])
    assert list(json.loads(summary.stdout)) == ["recompute", "prefix", "cacheslide"]
