"""One turn under scripted policies: who is asked what, in which order, and what the rows say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import pytest

from cacheslide_agents import answered
from cacheslide_agents.backend import GenerationChunk
from cacheslide_agents.bench import measure
from cacheslide_agents.bench.measure import WRITTEN, Bench
from cacheslide_agents.bench.results import Row
from cacheslide_agents.bench.workloads import Turn
from cacheslide_agents.chunks import Chunk, ChunkedPrompt, EncodedPrompt, Message
from cacheslide_agents.errors import BackendError
from cacheslide_agents.pages.slide import SlideStore
from cacheslide_agents.policies import Policy, named

if TYPE_CHECKING:
    from tests.support.scripted_backend import ScriptedBackend

NAMES = ("recompute", "prefix", "epic", "cacheslide", "cacheslide_paper")


def prompt(memory: str) -> ChunkedPrompt:
    chunks = (Chunk("system", "abcdefgh"), Chunk("memory", memory), Chunk("question", "who?"))
    return ChunkedPrompt((Message("user", chunks),), "memgpt")


TURN = Turn("row", 7, "memgpt", prompt("old"), prompt("older"), answers=("John Ford",))


@pytest.fixture
def scripted(support: Callable[[str], ModuleType]) -> ModuleType:
    return support("scripted_backend")


@pytest.fixture
def backend(scripted: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ScriptedBackend:
    script = scripted.Script
    made: ScriptedBackend = scripted.ScriptedBackend(
        {
            "recompute": script(seconds=8.0, outcome="cold", probabilities=(0.5, 0.5)),
            "prefix": script(seconds=4.0, outcome="partial", reused=8),
            "epic": script(seconds=2.0, reused=9, probabilities=(0.25, 0.75)),
            "cacheslide": script(seconds=1.0, reused=12, probabilities=(0.6, 0.4)),
            "cacheslide_paper": script(seconds=3.0, reused=12, score_outcome="fallback"),
        }
    )
    for module in (measure, answered):
        monkeypatch.setattr(module, "perf_counter", made.clock)
    return made


def policies() -> dict[str, Policy]:
    return {name: named(name) for name in NAMES}


def measured(backend: ScriptedBackend, rotate: int = 0, **setting: int) -> dict[str, Row]:
    bench = Bench(backend, backend.encode, **setting)
    rows = bench.measure(bench.populate(TURN, policies()), policies(), rotate)
    assert [row.policy for row in rows] == list(NAMES)
    return {row.policy: row for row in rows}


def test_the_previous_turn_is_cached_once_for_each_kind_of_population(
    backend: ScriptedBackend,
) -> None:
    Bench(backend, backend.encode).populate(TURN, policies())
    warmed = [request for kind, request in backend.calls if kind == "warm"]
    # the policy with a gate populates for all in-context ones: only then are checkpoints stored
    assert backend.asked("warm") == ["cacheslide_paper", "epic"]
    assert all(bytes(request.prompt_ids) == b"abcdefgholdwho?" for request in warmed)
    assert all(request.retain for request in warmed)


def test_every_row_has_a_namespace_of_its_own_that_all_its_requests_share(
    backend: ScriptedBackend,
) -> None:
    measured(backend)
    first = {request.namespace for _, request in backend.calls}
    backend.calls.clear()
    measured(backend)
    second = {request.namespace for _, request in backend.calls}
    assert len(first) == len(second) == 1
    assert first != second


def test_policies_that_use_a_ccpe_profile_find_contexts_made_under_it_and_others_do_not(
    backend: ScriptedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("calibrate", "add_profile"):
        monkeypatch.setattr(backend, name, lambda *_: None, raising=False)
    monkeypatch.setattr(backend, "profiled", frozenset({"memgpt"}), raising=False)
    measured(backend)
    assert backend.asked("warm") == ["cacheslide_paper", "prefix", "epic"]
    namespaces = {
        getattr(request.policy, "name", ""): request.namespace for _, request in backend.calls
    }
    assert namespaces["cacheslide"] == namespaces["cacheslide_paper"]
    assert namespaces["recompute"] == namespaces["prefix"] == namespaces["epic"]
    assert namespaces["cacheslide"] != namespaces["prefix"]


def test_measured_turns_never_become_a_cached_context(backend: ScriptedBackend) -> None:
    measured(backend)
    requests = [request for kind, request in backend.calls if kind != "warm"]
    assert len(requests) == 2 * len(NAMES)
    assert not any(request.retain for request in requests)
    assert all(bytes(request.prompt_ids) == b"abcdefgholderwho?" for request in requests)
    assert {request.task for request in requests} == {"memgpt"}


def test_policies_run_interleaved_in_an_order_that_rotates(backend: ScriptedBackend) -> None:
    measured(backend, rotate=2, repeats=2)
    order = ["epic", "cacheslide", "cacheslide_paper", "recompute", "prefix"]
    assert backend.asked("generate") == order * 2
    backend.calls.clear()
    measured(backend, rotate=len(NAMES))
    assert backend.asked("generate") == list(NAMES)


def test_time_to_first_token_starts_before_tokenisation_and_ends_at_the_first_token(
    scripted: ModuleType, backend: ScriptedBackend
) -> None:
    rows = measured(backend)
    expected = {"recompute": 8.0, "prefix": 4.0, "epic": 2.0, "cacheslide": 1.0}
    for name, seconds in expected.items():
        assert rows[name].ttft_s == seconds + scripted.ENCODE_SECONDS


def test_population_is_timed_and_its_bytes_counted_before_the_clock(
    scripted: ModuleType, backend: ScriptedBackend
) -> None:
    rows = measured(backend)
    assert rows["recompute"].populate_s == 0.0
    assert rows["prefix"].populate_s == rows["epic"].populate_s == scripted.WARM_SECONDS
    assert [rows[name].bytes_written for name in NAMES] == [0, 100, 100, 100, 100]


def test_bytes_are_counted_under_names_that_a_store_has(tmp_path: Path) -> None:
    with SlideStore(1 << 20, tmp_path) as store:
        assert set(WRITTEN) <= store.metrics().keys()


def test_the_median_of_repeated_answers_counts(
    backend: ScriptedBackend, scripted: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_first = iter((5.0, 1.0, 2.0))

    def encode(prompt: ChunkedPrompt) -> EncodedPrompt:
        encoded = backend.encode(prompt)
        if prompt is TURN.measure and timing:
            backend.now += next(slow_first)
        return encoded

    timing = False
    bench = Bench(backend, encode, repeats=3, answer_tokens=0)
    populated = bench.populate(TURN, {"recompute": named("recompute")})
    timing = True
    (row,) = bench.measure(populated, {"recompute": named("recompute")})
    assert row.ttft_s == 8.0 + 2.0 + scripted.ENCODE_SECONDS


def test_the_dense_runs_first_tokens_are_scored_under_every_policy(
    backend: ScriptedBackend,
) -> None:
    rows = measured(backend, kl_tokens=3)
    assert backend.scored == [(0, 1, 2)] * len(NAMES)
    assert rows["recompute"].kl == 0.0
    assert rows["epic"].kl == pytest.approx(0.5 * np.log(2) + 0.5 * np.log(2 / 3), rel=1e-6)
    assert rows["cacheslide"].kl == pytest.approx(-0.5 * np.log(4 * 0.6 * 0.4), rel=1e-6)
    assert (rows["cacheslide"].top1, rows["epic"].top1) == (1.0, 0.0)


def test_the_answer_is_the_first_line_and_is_scored_against_the_gold_answer(
    backend: ScriptedBackend,
) -> None:
    row = measured(backend)["cacheslide"]
    assert (row.answer, row.f1, row.em) == ("John Ford", 1.0, 1.0)


def test_without_answers_only_the_dense_run_generates_more_than_one_token(
    backend: ScriptedBackend,
) -> None:
    rows = measured(backend, answer_tokens=0, kl_tokens=3)
    asked = {
        request.policy.name: request.sampling.max_tokens
        for kind, request in backend.calls
        if kind == "generate" and request.policy is not None
    }
    assert asked == {"recompute": 3}
    assert all((row.answer, row.f1, row.em) == (None, None, None) for row in rows.values())


def test_rows_carry_what_the_receipt_says(backend: ScriptedBackend) -> None:
    row = measured(backend)["cacheslide"]
    assert (row.id, row.turn, row.prompt_tokens) == ("row", 7, 17)
    assert (row.reused_tokens, row.active_tokens, row.compute_fraction) == (12, 5, 5 / 17)
    assert (row.outcome, row.reason, row.peak_kv_bytes) == ("hit", "scripted hit", 4096)


def test_the_first_change_is_the_first_token_that_differs(backend: ScriptedBackend) -> None:
    assert measured(backend)["cacheslide"].first_change == len("abcdefghold")


def test_a_fallback_while_scoring_makes_the_row_a_fallback_that_reused_nothing(
    backend: ScriptedBackend,
) -> None:
    row = measured(backend)["cacheslide_paper"]
    assert (row.outcome, row.reason, row.reused_tokens) == ("fallback", "scripted fallback", 0)


def test_an_answer_without_a_token_ends_the_run(backend: ScriptedBackend) -> None:
    backend.answer = ""
    backend.generate = lambda request: (_ for _ in list[GenerationChunk]())  # type: ignore[method-assign]
    with pytest.raises(BackendError, match="ended without token or receipt"):
        measured(backend)


def test_without_answers_a_policy_is_timed_by_its_scoring_and_the_dense_run_goes_first(
    scripted: ModuleType, backend: ScriptedBackend
) -> None:
    rows = measured(backend, rotate=2, answer_tokens=0)
    assert backend.asked("generate") == ["recompute"]
    order = ["epic", "cacheslide", "cacheslide_paper", "prefix", "recompute"]
    assert backend.asked("score") == order
    assert rows["cacheslide"].ttft_s == 1.0 + scripted.ENCODE_SECONDS
    assert rows["epic"].kl == pytest.approx(0.5 * np.log(2) + 0.5 * np.log(2 / 3), rel=1e-6)
