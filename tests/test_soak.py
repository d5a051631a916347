"""What the soak test notices: a backend that mixes answers up, errs, hangs on to memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from cacheslide_agents.backend import GenerationChunk, GenerationRequest, Receipt, TokenLogprob

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
TEXT = list(range(2, 402))


class Engine:
    """Answers with tokens that follow from the prompt, or from another's, as it is told to."""

    def __init__(self, **wrong: Any) -> None:
        self.wrong, self.namespaces = wrong, set[str]()
        self.last: list[int] = []
        self.gap = wrong.get("gap", 1.0)

    async def agenerate(self, request: GenerationRequest) -> AsyncGenerator[GenerationChunk, None]:
        ids = list(request.prompt_ids)
        for number in range(request.sampling.max_tokens):
            await asyncio.sleep(0)
            source = self.last if self.wrong.get("mixes") and self.last else ids
            token = (sum(source) + number) % 500
            told = TokenLogprob(token, -1.0, ((token, -1.0), (token + 1, -1.0 - self.gap)))
            yield GenerationChunk(0, "", (token,), (told,))
        self.last = [] if request.namespace == "checked" else ids
        yield GenerationChunk(0, "", (), finish_reason="length", receipt=self.receipt(request))

    def receipt(self, request: GenerationRequest) -> Receipt:
        assert request.policy is not None
        dense = request.policy.name == "recompute"
        known = request.namespace in self.namespaces or self.wrong.get("leaks", False)
        reused = 20 if known and not dense else 0
        if not dense:
            self.namespaces.add(request.namespace)
        made = Receipt(
            request_id=request.request_id,
            policy=request.policy.name,
            outcome="partial" if reused else "cold",
            reason="",
            prompt_tokens=len(request.prompt_ids),
            reused_tokens=reused,
            active_tokens=len(request.prompt_ids) - reused,
            compute_fraction=1.0,
            exact=True,
        )
        return replace(made, **self.wrong.get("receipt", {}))


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The soak test's modules, as its script sees them."""
    monkeypatch.syspath_prepend(str(SCRIPTS))

    def load(name: str) -> ModuleType:
        return __import__(name)

    return load


def soaked(sessions: ModuleType, engine: Engine, rounds: int = 40) -> Any:
    """The record of three sessions and their check."""
    record, left = sessions.Record(), iter(range(rounds))

    async def all_of_them() -> None:
        made = [sessions.Session(engine, number, TEXT, record, 0) for number in range(3)]
        await asyncio.gather(*(each.run(lambda: next(left, None) is None) for each in made))
        await sessions.check(engine, record)

    asyncio.run(all_of_them())
    return record


def test_a_sound_backend_passes_and_every_kind_of_request_is_made(parts: Any) -> None:
    record = soaked(parts("soak_vllm_sessions"), Engine())
    assert record.errors == []
    assert set(record.asked) == {"reused", "corrected", "dense", "aborted"}
    assert record.checked == len(record.samples) > 5
    assert record.outcomes["partial"] and record.outcomes["cold"]


def test_answers_of_another_prompt_are_noticed(parts: Any) -> None:
    record = soaked(parts("soak_vllm_sessions"), Engine(mixes=True))
    assert any("among others" in error for error in record.errors)


def test_tokens_that_are_equally_likely_may_change_places(parts: Any) -> None:
    record = soaked(parts("soak_vllm_sessions"), Engine(mixes=True, gap=1e-4))
    assert record.errors == []
    assert record.ties > 0


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"leaks": True}, "tokens of a first prompt reused"),
        ({"receipt": {"request_id": "other"}}, "the receipt is that of other"),
        ({"receipt": {"prompt_tokens": 7}}, "a prompt of 7 tokens"),
        ({"receipt": {"reused_tokens": 9}}, "9 tokens of a dense one reused"),
        ({"receipt": {"outcome": "fallback", "reason": "RuntimeError: no"}}, "RuntimeError: no"),
    ],
)
def test_a_receipt_that_cannot_be_right_is_noticed(
    parts: Any, wrong: dict[str, Any], message: str
) -> None:
    record = soaked(parts("soak_vllm_sessions"), Engine(**wrong))
    assert any(message in error for error in record.errors)


def test_a_context_that_has_left_a_small_store_is_no_error(parts: Any) -> None:
    lost = {"outcome": "fallback", "reason": "PageError: it is gone", "reused_tokens": 0}
    record = soaked(parts("soak_vllm_sessions"), Engine(receipt=lost))
    assert record.errors == []
    assert record.reasons["PageError"] == sum(record.outcomes.values())


def test_an_exception_ends_the_session_and_stands_in_the_record(parts: Any) -> None:
    class Broken(Engine):
        def receipt(self, request: GenerationRequest) -> Receipt:
            raise RuntimeError("engine dead")

    record = soaked(parts("soak_vllm_sessions"), Broken())
    assert len(record.errors) == 3
    assert all("engine dead" in error for error in record.errors)


def test_samples_are_bounded_and_drawn_from_the_whole_run(parts: Any) -> None:
    from random import Random

    sessions = parts("soak_vllm_sessions")
    record, random = sessions.Record(most=10), Random(0)
    for number in range(1000):
        record.keep(sessions.Sample(str(number), [], None), random)
    drawn = [int(sample.name) for sample in record.samples]
    assert len(drawn) == 10
    assert max(drawn) > 500


@pytest.mark.parametrize(
    ("mib", "grown"),
    [([100.0] * 60, 0.0), ([50.0] * 20 + [100.0] * 40, 0.0), ([100.0] * 40 + [120.0] * 20, 0.2)],
)
def test_memory_is_judged_after_caches_have_filled(
    parts: Any, mib: list[float], grown: float
) -> None:
    assert parts("soak_vllm").growth(mib) == pytest.approx(grown)


def test_resident_memory_is_read_in_mib(parts: Any) -> None:
    resident = parts("soak_vllm").resident_mib
    before = resident()
    held = np.ones(256 << 20, np.uint8)
    assert held.nbytes == 256 << 20
    assert resident() - before == pytest.approx(256, rel=0.2)
