"""The script that measures planning: what it plans, and what it prints. Times are not judged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return __import__("planning_figures")


def test_turns_differ_in_one_line_at_an_eighth(script: Any, smollm2_tokenizer: Any) -> None:
    turns = script.turns_of(smollm2_tokenizer, 800)
    one, two = (turns.turn(number).messages[0] for number in (1, 2))
    changed = [a.id for a, b in zip(one.chunks, two.chunks, strict=True) if a != b]
    assert changed == ["memory"]
    head, _, rest = one.content.partition(one.chunks[2].text)
    assert len(head) / len(head + rest) == pytest.approx(1 / 8, abs=0.01)
    assert head + rest == turns.text
    assert len(smollm2_tokenizer(turns.text)["input_ids"]) == pytest.approx(800, abs=1)


def test_figures_are_of_a_plan_that_reuses_all_but_the_line(
    script: Any, tiny_model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--model", tiny_model, "--tokens", "500", "900", "--repeats", "2"]
    script.main([*arguments, "--json"])
    figures = json.loads(capsys.readouterr().out)["figures"]
    for figure, tokens in zip(figures, (500, 900), strict=True):
        assert tokens < figure["tokens"] < tokens + 80
        assert figure["tokens"] * (1 - figure["reused"]) < 40
        assert figure["outcome"] == "hit"
    script.main(arguments)
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_more_tokens_than_there_are_is_an_error(script: Any, smollm2_tokenizer: Any) -> None:
    with pytest.raises(SystemExit, match="lower --tokens"):
        script.turns_of(smollm2_tokenizer, 10_000_000)
