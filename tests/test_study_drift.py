"""The drift study on a tiny model: sessions of many turns, three ways of refreshing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from cacheslide_agents.bench.results import read_json
from cacheslide_agents.bench.runner import token_limits
from cacheslide_agents.bench.studies import run_study
from cacheslide_agents.bench.workloads.chains import chains
from cacheslide_agents.errors import DataError
from cacheslide_agents.prompt.chat import ChatEncoder
from torch_cacheslide import TorchBackend


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, support: Callable[[str], ModuleType]) -> Path:
    folder: Path = support("tiny_data").write_tiny_data(tmp_path_factory.mktemp("data"))
    return folder


@pytest.fixture(scope="module")
def backend(tiny_model: str) -> Iterator[TorchBackend]:
    backend = TorchBackend(tiny_model, device="cpu")
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def limits(backend: TorchBackend) -> Any:
    return token_limits(backend, ChatEncoder(backend.tokenizer).encode, 4096)


@pytest.mark.parametrize("task", ["reflexion", "memgpt", "swe_agent"])
def test_every_prompt_of_a_session_changes_and_fits(data: Path, limits: Any, task: str) -> None:
    (chain, *_) = chains(task, data, limits, turns=3)
    assert chain.task == task
    assert len(chain.prompts) == 4
    assert all(limits.fits(prompt) for prompt in chain.prompts)
    texts = ["".join(message.content for message in prompt.messages) for prompt in chain.prompts]
    assert len(set(texts)) == 4


def test_a_memgpt_session_says_one_exchange_more_every_turn(data: Path, limits: Any) -> None:
    (chain,) = chains("memgpt", data, limits, turns=8)
    texts = ["".join(message.content for message in prompt.messages) for prompt in chain.prompts]
    assert [text.count("We spoke of boats and weather") // 6 for text in texts] == [
        2 * exchange for exchange in range(4, 13)
    ]
    assert "I own boat 0.1." in texts[0] and "I own boat 2.1." not in texts[0]
    assert "I own boat 2.1." in texts[-1]


def test_a_reflexion_session_goes_on_with_the_next_question(data: Path, limits: Any) -> None:
    (chain,) = chains("reflexion", data, limits, turns=3)
    texts = ["".join(message.content for message in prompt.messages) for prompt in chain.prompts]
    asked = ["Which river flows past mill 0?" in text for text in texts]
    assert asked == [True, True, True, False]
    assert [("Look twice." in text, "Ask." in text) for text in texts[:3]] == [
        (False, False),
        (True, False),
        (True, True),
    ]


def test_sessions_shorter_than_asked_for_are_left_out(data: Path, limits: Any) -> None:
    assert list(chains("swe_agent", data, limits, turns=50)) == []
    with pytest.raises(DataError, match="no agent sessions of 'length'"):
        list(chains("length", data, limits, turns=1))


def test_drift_follows_every_turn_under_every_refresh(
    data: Path, backend: TorchBackend, tmp_path: Path
) -> None:
    out = tmp_path / "drift.json"
    options: dict[str, Any] = {
        "data": data,
        "backend": backend,
        "out": out,
        "tasks": ("memgpt",),
        "turns": 3,
        "kl_tokens": 4,
    }
    found = run_study("drift", **options)
    assert read_json(out) == found
    rows = found["turns"]
    assert [(row["refresh"], row["turn"]) for row in rows] == [
        (mode, turn) for mode in ("corrected", "never", "guarded") for turn in (1, 2, 3)
    ]
    first = [row for row in rows if row["turn"] == 1]
    assert len({row["kl"] for row in first}) == 1  # all three start from the same dense context
    assert first[0]["outcome"] in ("hit", "partial") and first[0]["kl"] > 0.0
    assert {row["refreshed"] for row in rows if row["refresh"] != "guarded"} == {0.0}
    guarded = [row for row in rows if row["refresh"] == "guarded"]
    for before, after in pairwise(guarded):
        if before["refreshed"]:
            assert (after["outcome"], after["kl"]) == ("declined", pytest.approx(0.0, abs=1e-5))

    kept = [row | {"kl": 7.0} if row["refresh"] == "never" else row for row in rows]
    resumed = run_study_from(out, found | {"turns": kept[:-1]}, options)
    assert resumed["turns"][3:6] == kept[3:6]  # complete sessions are not measured again
    assert [row["turn"] for row in resumed["turns"][6:]] == [1, 2, 3]


def run_study_from(out: Path, earlier: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    from cacheslide_agents.bench.results import write_json

    write_json(out, earlier)
    return run_study("drift", resume=True, **options)
