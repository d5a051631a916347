"""The stale study: what its cases say, how answers are judged, and that a run can be resumed."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from cacheslide_agents.bench import run_study
from cacheslide_agents.bench.studies.stale_cases import HISTORIES, Case, stale_cases
from cacheslide_agents.chunks import ChunkedPrompt
from cacheslide_agents.errors import DataError, RequestError
from cacheslide_agents.prompt.chat import ChatEncoder
from torch_cacheslide import TorchBackend

CASES = stale_cases()


def names(case: Case) -> str:
    return case.id


def text_of(prompt: ChunkedPrompt, *, memory: bool) -> str:
    return "".join(chunk.text for chunk in prompt.chunks() if (chunk.id == "memory") is memory)


def says(text: str, value: str) -> bool:
    return re.search(rf"\b{value}\b", text) is not None


def test_there_are_enough_cases_and_every_value_takes_part_both_ways() -> None:
    assert len(CASES) >= 60
    assert len({case.id for case in CASES}) == len(CASES)
    assert set(Counter(case.history for case in CASES).values()) == {len(CASES) // len(HISTORIES)}
    pairs = Counter((case.history, case.old, case.new) for case in CASES)
    assert all(pairs[history, new, old] == count for (history, old, new), count in pairs.items())


@pytest.mark.parametrize("case", CASES, ids=names)
def test_a_case_changes_the_memory_block_and_nothing_else(case: Case) -> None:
    old, new = case.turn.populate, case.turn.measure
    pairs = list(zip(old.chunks(), new.chunks(), strict=True))
    assert [a.id for a, b in pairs if a != b] == ["memory"]
    assert text_of(old, memory=True).count(case.answers[0]) == 1
    assert text_of(new, memory=True).count(case.answers[1]) == 1
    assert not says(text_of(new, memory=True), case.old)
    assert case.turn.answers == (case.new,)


@pytest.mark.parametrize("case", CASES, ids=names)
def test_the_history_speaks_of_the_value_it_should_and_of_no_other(case: Case) -> None:
    history = text_of(case.turn.measure, memory=False)
    spoken = {value for value in (case.old, case.new) if says(history, value)}
    assert spoken == {"neutral": set(), "old": {case.old}, "new": {case.new}}[case.history]


def found(case: Case, margin: float, text: str, policies: tuple[str, ...]) -> dict[str, Any]:
    """A case of an earlier run in which every policy but `recompute` answered like this."""
    said = {"margin": margin, "text": text}
    dense = {"margin": 1.0, "text": f"It is {case.new}."}
    return {
        "id": case.id,
        "history": case.history,
        "old": case.old,
        "new": case.new,
        "prompt_tokens": 1200,
        "policies": {name: dense if name == "recompute" else said for name in policies},
    }


def test_shares_count_preferences_words_and_agreement_with_dense(
    support: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    """Every case is known from an earlier run, so that the backend is not asked."""
    answers = {
        "neutral": (0.5, "{new}, I think."),
        "old": (-0.5, "It is {old}."),
        "new": (0.0, "{old}, or is it {new}?"),
    }
    cases = []
    for case in CASES:
        margin, text = answers[case.history]
        said = text.format(old=case.old.upper(), new=case.new)
        cases.append(found(case, margin, said, ("recompute", "cacheslide")))
    out = tmp_path / "stale.json"
    out.write_text(
        json.dumps({"schema": 1, "study": "stale", "model": "fake-model", "cases": cases})
    )
    backend = support("fake_backend").FakeBackend()
    options = {"backend": backend, "out": out, "resume": True, "policies": ("cacheslide",)}
    result = run_study("stale", data=tmp_path, **options)
    assert backend.requests == []
    n, third = len(CASES), len(CASES) // 3
    share = pytest.approx(1 / 3)
    assert result["recompute"] == {
        "new": 1.0,
        "old": 0.0,
        "n": n,
        "greedy_new": 1.0,
        "greedy_old": 0.0,
        "same_as_dense": 1.0,
        "by_history": {kind: {"new": 1.0, "old": 0.0, "n": third} for kind in HISTORIES},
    }
    slide = result["cacheslide"]
    assert (slide["new"], slide["old"], slide["n"]) == (share, pytest.approx(2 / 3), n)
    assert (slide["greedy_new"], slide["greedy_old"], slide["same_as_dense"]) == (share,) * 3
    assert slide["by_history"]["old"] == {"new": 0.0, "old": 1.0, "n": third}
    assert json.loads(out.read_text()) == json.loads(json.dumps(result))


def test_a_tiny_model_is_asked_and_a_run_goes_on_where_it_stopped(
    tiny_model: str, tmp_path: Path
) -> None:
    backend = TorchBackend(tiny_model, device="cpu")
    done: list[tuple[int, int]] = []
    out = tmp_path / "stale.json"

    def progress(number: int, total: int, label: str) -> None:
        done.append((number, total))

    options: dict[str, Any] = {"data": tmp_path, "backend": backend, "out": out}
    options["policies"] = ("prefix", "prompt_cache", "cacheslide")
    result = run_study("stale", **options, limit=1, progress=progress)
    names = ("recompute", *options["policies"])
    assert [result[name]["n"] for name in names] == [1] * len(names)
    assert done == [(1, 1)]
    assert json.loads(out.read_text())["study"] == "stale"
    (case,) = result["cases"]
    said = case["policies"]
    assert said["recompute"]["margin"] == pytest.approx(log_odds(tiny_model, CASES[0]), abs=1e-3)
    assert said["prefix"]["margin"] == pytest.approx(said["recompute"]["margin"], abs=1e-3)
    assert said["prefix"]["text"] == said["recompute"]["text"]
    resumed = run_study("stale", **options, limit=2, resume=True)
    assert resumed["cases"][0] == json.loads(json.dumps(case))
    assert resumed["cacheslide"]["n"] == 2
    backend.close()


def log_odds(folder: str, case: Case) -> float:
    """Of the new value against the old one, by transformers alone."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    prompt = list(ChatEncoder(tokenizer).encode(case.turn.measure).ids)
    old, new = (tokenizer(each, add_special_tokens=False)["input_ids"] for each in case.answers)
    parting = next(i for i in range(len(new)) if old[i] != new[i])
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + new[:parting]])).logits[0, -1]
    return float(logits[new[parting]] - logits[old[parting]])


@pytest.mark.parametrize(
    ("study", "content", "message"),
    [
        ("stale", {"schema": 1, "study": "stale", "model": "other"}, "the file's model is 'other'"),
        ("stale", {"schema": 1, "study": "length"}, "is no 'stale' study of schema 1"),
        ("stale", [], "must hold a JSON object"),
        (
            "stale",
            {"schema": 1, "study": "stale", "model": "fake-model", "cases": [{"id": "x"}]},
            "cases are malformed",
        ),
    ],
)
def test_a_run_is_resumed_from_its_own_file_only(
    support: Callable[[str], ModuleType], tmp_path: Path, study: str, content: Any, message: str
) -> None:
    out = tmp_path / "study.json"
    out.write_text(json.dumps(content))
    backend = support("fake_backend").FakeBackend()
    with pytest.raises(DataError, match=message):
        run_study(study, data=tmp_path, backend=backend, out=out, resume=True, policies=("prefix",))
    assert json.loads(out.read_text()) == content


def test_a_study_that_cannot_go_on_refuses_to(
    support: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    backend = support("fake_backend").FakeBackend()
    with pytest.raises(RequestError, match="study 'length' cannot be resumed"):
        run_study("length", data=tmp_path, backend=backend, resume=True)


def test_a_case_that_is_too_long_is_refused_before_it_is_asked(
    support: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    backend = support("fake_backend").FakeBackend()
    with pytest.raises(DataError, match="raise --max-prompt-tokens"):
        run_study(
            "stale",
            data=tmp_path,
            backend=backend,
            policies=("prefix",),
            limit=1,
            max_prompt_tokens=100,
        )
    assert backend.requests == []
