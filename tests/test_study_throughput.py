"""The throughput study on a backend without a model: who is asked what, and what is counted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from cacheslide_agents.backend import GenerationChunk, GenerationRequest
from cacheslide_agents.bench.results import read_json
from cacheslide_agents.bench.studies import run_study
from cacheslide_agents.bench.studies.throughput import POLICIES
from cacheslide_agents.errors import BackendError, DataError

TOKENS = 3


class Engine:
    """Answers with `TOKENS` tokens, all requests at once; counts how many are open."""

    def __init__(self, fake: Any) -> None:
        self.fake, self.tokenizer, self.model_id = fake, fake.tokenizer, fake.model_id
        self.max_model_len = 1 << 16
        self.warmed: list[GenerationRequest] = []
        self.asked: list[GenerationRequest] = []
        self.open = self.most_open = self.forgotten = 0
        self.silent = False

    async def agenerate(self, request: GenerationRequest) -> AsyncGenerator[GenerationChunk, None]:
        self.asked.append(request)
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        for token in range(TOKENS):
            await asyncio.sleep(0)
            yield GenerationChunk(0, "x", () if self.silent else (token,))
        self.open -= 1
        receipt = self.fake._receipt(request)
        if request.policy is not None and request.policy.name == "epic":
            receipt = replace(receipt, outcome="fallback", reason="torn page")
        yield GenerationChunk(0, "", (), finish_reason="length", receipt=receipt)

    def warm(self, request: GenerationRequest) -> None:
        self.warmed.append(request)

    def forget_prefixes(self) -> None:
        self.forgotten += 1


@pytest.fixture
def engine(support: Callable[[str], ModuleType]) -> Engine:
    return Engine(support("fake_backend").FakeBackend(reused=100))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, support: Callable[[str], ModuleType]) -> Path:
    folder: Path = support("tiny_data").write_tiny_data(tmp_path_factory.mktemp("data"))
    return folder


def study(engine: Any, data: Path, **options: Any) -> dict[str, Any]:
    given = {"max_prompt_tokens": 60_000, "sessions": 2, "limit": 2, **options}
    return run_study("throughput", data=data, backend=engine, **given)


def test_every_policy_serves_the_same_turns_of_both_agents(engine: Engine, data: Path) -> None:
    found = study(engine, data)
    assert list(found["policies"]) == list(POLICIES)
    served = [
        [(row["id"], row["turn"], row["task"]) for row in found["rows"] if row["policy"] == name]
        for name in POLICIES
    ]
    assert {task for _, _, task in served[0]} == {"reflexion", "memgpt"}
    assert all(each == served[0] for each in served)
    assert engine.forgotten == len(POLICIES)


def test_a_turn_finds_its_own_context_and_no_other(engine: Engine, data: Path) -> None:
    study(engine, data)
    warmed = {request.namespace: request for request in engine.warmed}
    asked = {request.namespace: request for request in engine.asked}
    assert len(warmed) == len(engine.warmed)
    assert warmed.keys() == asked.keys()
    for name, request in asked.items():
        assert request.policy == warmed[name].policy
        assert request.task == warmed[name].task
        assert list(request.prompt_ids) != list(warmed[name].prompt_ids)
        assert request.retain
        assert (request.sampling.max_tokens, request.sampling.ignore_eos) == (32, True)


@pytest.mark.parametrize("sessions", [1, 3])
def test_so_many_sessions_are_open_at_once_each_with_one_request(
    engine: Engine, data: Path, sessions: int
) -> None:
    found = study(engine, data, sessions=sessions)
    assert engine.most_open == sessions
    for policy in POLICIES:
        for session in range(sessions):
            mine = [r for r in found["rows"] if (r["policy"], r["session"]) == (policy, session)]
            ends = [row["done_s"] for row in mine]
            assert all(end <= row["sent_s"] for end, row in zip(ends[:-1], mine[1:], strict=True))


def test_figures_are_those_of_the_rows(engine: Engine, data: Path) -> None:
    found = study(engine, data)
    for name, figures in found["policies"].items():
        rows = [row for row in found["rows"] if row["policy"] == name]
        first = [row["tokens_s"][0] - row["sent_s"] for row in rows]
        assert [row["ttft_s"] for row in rows] == first
        assert figures["ttft_p50_s"] == pytest.approx(np.median(first))
        assert figures["ttft_p50_s"] <= figures["ttft_p99_s"] <= max(first)
        assert figures["requests"] == len(rows)
        assert figures["seconds"] == max(row["done_s"] for row in rows)
        assert figures["requests_per_s"] * figures["seconds"] == pytest.approx(len(rows))
        assert figures["tokens_per_s"] * figures["seconds"] == pytest.approx(TOKENS * len(rows))
        assert sum(figures["outcomes"].values()) == len(rows)


def test_fallbacks_stay_in_the_headline(engine: Engine, data: Path) -> None:
    found = study(engine, data)
    assert found["policies"]["epic"]["outcomes"] == {"fallback": len(found["rows"]) // 5}
    for name, ratios in found["headline"].items():
        for baseline in ("recompute", "prefix"):
            mine, theirs = (found["policies"][each]["requests_per_s"] for each in (name, baseline))
            assert ratios[f"vs_{baseline}"] == mine / theirs
    assert set(found["headline"]) == {"cacheslide", "cache_blend", "epic"}


def test_tokens_are_counted_in_whole_seconds() -> None:
    from cacheslide_agents.bench.studies.throughput import _figures

    row = {
        "done_s": 3.5,
        "tokens_s": (0.1, 0.2, 1.5, 2.0, 2.1, 2.9, 3.4),
        "ttft_s": 0.1,
        "active_tokens": 5,
        "prompt_tokens": 10,
        "outcome": "hit",
    }
    figures = _figures([row])
    assert figures["tokens_std"] == pytest.approx(np.std([2, 1, 3]))
    assert figures["tokens_per_s"] == 2.0
    assert figures["compute_fraction"] == 0.5


def test_an_interrupted_run_goes_on_with_the_next_policy(
    engine: Engine, data: Path, tmp_path: Path
) -> None:
    out = tmp_path / "throughput.json"

    def stop(done: int, _: int, __: str) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        study(engine, data, out=out, progress=stop)
    partial = read_json(out)
    assert list(partial["policies"]) == list(POLICIES[:2])
    engine.asked.clear()
    found = study(engine, data, out=out, resume=True)
    assert read_json(out) == found
    assert found["rows"][: len(partial["rows"])] == partial["rows"]
    assert {request.policy.name for request in engine.asked if request.policy} == {
        "cacheslide",
        "cache_blend",
        "epic",
    }
    with pytest.raises(DataError, match="sessions is 2, not 3"):
        study(engine, data, out=out, resume=True, sessions=3)


def test_an_answer_without_a_token_ends_the_study(engine: Engine, data: Path) -> None:
    engine.silent = True
    with pytest.raises(BackendError, match="without token or receipt"):
        study(engine, data)


def test_a_backend_of_one_request_at_a_time_is_refused(
    support: Callable[[str], ModuleType], data: Path
) -> None:
    fake = support("fake_backend").FakeBackend()
    with pytest.raises(BackendError, match="use --backend vllm"):
        study(fake, data)
