"""The quality guard: its state machine on its own, and a harmful cache entry planted in a store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread
from time import time
from types import ModuleType

import numpy as np
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from cacheslide_agents.backend import GenerationRequest, Receipt
from cacheslide_agents.errors import RequestError
from cacheslide_agents.pages import ContextKey, MemoryStore
from cacheslide_agents.pages.prometheus import Exporter
from cacheslide_agents.policies import CacheSlide
from cacheslide_agents.policies.guard import QualityGuard, Verdict
from torch_cacheslide import TorchBackend
from torch_cacheslide.idle import divergence
from torch_cacheslide.jobs import Job

KEY, OTHER = (ContextKey("model", "tenant", task) for task in ("reflexion", "memgpt"))
POLICY = CacheSlide(may_decline=False)


def test_every_nth_reuse_of_a_key_is_due() -> None:
    guard = QualityGuard(every=3)
    assert [guard.due(KEY) for _ in range(7)] == [False, False, True, False, False, True, False]
    assert [guard.due(OTHER) for _ in range(3)] == [False, False, True]


def test_a_key_is_declined_once_its_mean_passes_the_budget() -> None:
    guard = QualityGuard(every=1, budget=0.1)
    assert guard.record(KEY, 0.05, now=1.0) is Verdict.TRUSTED
    assert guard.record(KEY, 0.14, now=2.0) is Verdict.TRUSTED  # mean 0.095
    assert not guard.declines(KEY)
    assert guard.record(KEY, 0.2, now=3.0) is Verdict.TRIPPED  # mean 0.13
    assert guard.declines(KEY) and guard.tripped_at(KEY) == 3.0
    assert not guard.declines(OTHER)


def test_old_checks_leave_the_window() -> None:
    guard = QualityGuard(every=1, budget=0.1, window=2)
    guard.record(KEY, 0.1, now=1.0)
    guard.record(KEY, 0.0, now=2.0)
    assert guard.record(KEY, 0.19, now=3.0) is Verdict.TRUSTED  # mean of the last two: 0.095
    assert guard.record(KEY, 0.02, now=4.0) is Verdict.TRIPPED  # (0.19 + 0.02) / 2


def test_one_check_within_budget_lifts_it_and_old_distances_are_forgotten() -> None:
    guard = QualityGuard(every=1, budget=0.1)
    guard.record(KEY, 9.0, now=1.0)
    assert guard.record(KEY, 0.2, now=2.0) is Verdict.DISTRUSTED
    assert guard.record(KEY, float("inf"), now=3.0) is Verdict.DISTRUSTED
    assert guard.record(KEY, 0.1, now=4.0) is Verdict.LIFTED
    assert not guard.declines(KEY) and guard.tripped_at(KEY) is None
    assert guard.record(KEY, 0.05, now=5.0) is Verdict.TRUSTED


def test_what_happened_is_counted() -> None:
    guard = QualityGuard(every=1, budget=0.1)
    guard.record(KEY, 9.0, now=1.0)
    guard.declines(KEY)
    guard.declines(KEY)
    guard.record(OTHER, 9.0, now=2.0)
    guard.record(OTHER, 0.0, now=3.0)
    assert guard.metrics() == {
        "guard_checks": 3.0,
        "guard_trips": 2.0,
        "guard_lifts": 1.0,
        "guard_declined": 2.0,
        "guard_on_dense": 1.0,
    }


@pytest.mark.parametrize("window", [0, 1.5])
def test_a_window_must_hold_a_check(window: int) -> None:
    with pytest.raises(RequestError, match="window="):
        QualityGuard(window=window)


def test_divergence_is_the_sum_over_the_vocabulary() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.2, 0.6])
    expected = sum(float(a) * float((a / b).log()) for a, b in zip(p, q, strict=True))
    assert divergence(p.log() + 7.0, q.log() - 3.0) == pytest.approx(expected, rel=1e-6)
    assert divergence(p.log(), p.log()) == 0.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, support: Callable[[str], ModuleType]) -> Path:
    written: Path = support("tiny_models").write_model(
        tmp_path_factory.mktemp("tiny"),
        num_hidden_layers=3,
        max_position_embeddings=1024,
        initializer_range=0.3,
    )
    return written


@pytest.fixture
def backend(folder: Path) -> Iterator[TorchBackend]:
    backend = TorchBackend(
        str(folder), device="cpu", store=MemoryStore(1 << 28), guard_every=2, guard_budget=0.05
    )
    yield backend
    backend.close()


HEAD, TAIL = (np.random.default_rng(seed).integers(3, 250, 120).tolist() for seed in (1, 2))


def request(turn: int, task: str = "reflexion") -> GenerationRequest:
    """Turn by turn another middle of 8 tokens, so that all after it is reused at its place."""
    middle = np.random.default_rng(100 + turn).integers(3, 250, 8).tolist()
    return GenerationRequest([*HEAD, *middle, *TAIL], task=task, session="agent", policy=POLICY)


def answer(backend: TorchBackend, turn: int, task: str = "reflexion") -> Receipt:
    *_, last = backend.generate(request(turn, task))
    assert last.receipt is not None
    assert backend.settle(60)
    return last.receipt


def plant(backend: TorchBackend) -> None:
    """Keys and values of other text under the right tokens, said to be exact."""
    store, key = backend.store, ContextKey(backend.fingerprint, "default", "reflexion")
    right = store.find(key)[0]
    other = np.random.default_rng(9).integers(3, 250, len(right)).tolist()
    backend.warm(GenerationRequest(other, namespace="elsewhere", policy=POLICY))
    wrong = store.find(ContextKey(backend.fingerprint, "elsewhere", "default"))[0]
    layers = [store.load(wrong, layer) for layer in range(backend.layers)]
    store.put(replace(right, created=right.created), layers)


def test_a_planted_entry_is_noticed_its_task_falls_back_and_comes_back(
    backend: TorchBackend, caplog: pytest.LogCaptureFixture
) -> None:
    answer(backend, 0)
    plant(backend)
    assert answer(backend, 1).outcome in ("hit", "partial")  # the guard looks at every second
    plant(backend)
    assert answer(backend, 2).outcome in ("hit", "partial")
    assert backend.metrics()["guard_trips"] == 1
    assert "is answered densely" in caplog.text
    assert backend.metrics()["refreshes"] > 0

    declined = answer(backend, 3)
    assert (declined.outcome, declined.reason) == ("declined", "guard")
    assert declined.exact and declined.reused_tokens == 0
    assert backend.metrics()["guard_declined"] == 1
    assert backend.metrics()["guard_lifts"] == 1  # the contexts were computed anew meanwhile

    assert answer(backend, 4).outcome in ("hit", "partial")
    assert backend.metrics()["guard_on_dense"] == 0


def test_other_tasks_go_on_reusing_while_one_is_on_dense(backend: TorchBackend) -> None:
    answer(backend, 0)
    answer(backend, 0, task="memgpt")
    for turn in (1, 2):
        plant(backend)
        answer(backend, turn)
    assert backend.metrics()["guard_on_dense"] == 1
    assert answer(backend, 1, task="memgpt").outcome in ("hit", "partial")


def test_honest_reuse_is_checked_and_trusted(backend: TorchBackend) -> None:
    for turn in range(5):
        answer(backend, turn)
    counted = backend.metrics()
    assert (counted["guard_checks"], counted["guard_trips"]) == (2, 0)
    assert 0.0 <= counted["guard_kl"] < 0.05


def test_exact_reuse_does_not_outvote_what_may_be_off(backend: TorchBackend) -> None:
    """Every second approximate reuse is checked, however many exact ones lie between."""
    answer(backend, 0)
    for turn in range(1, 5):
        *_, appended = backend.generate(grown(turn))
        assert appended.receipt is not None and appended.receipt.exact
        assert appended.receipt.reused_tokens > 0
    assert backend.settle(60)
    assert backend.metrics()["guard_checks"] == 0
    for turn in (1, 2):
        assert not answer(backend, turn).exact
    assert backend.metrics()["guard_checks"] == 1


def test_what_falls_again_is_no_counter_to_prometheus(backend: TorchBackend) -> None:
    answer(backend, 0)
    families = text_string_to_metric_families(Exporter(backend.metrics).text())
    kinds = {family.name.removeprefix("cacheslide_"): family.type for family in families}
    for name in ("idle_waiting", "guard_kl", "guard_on_dense"):
        assert kinds[name] == "gauge"
    for name in ("idle_done", "guard_checks", "requests"):
        assert kinds[name] == "counter"


def test_without_the_option_nothing_is_checked(folder: Path) -> None:
    backend = TorchBackend(str(folder), device="cpu")
    for turn in range(3):
        answer(backend, turn)
    assert "guard_checks" not in backend.metrics()
    assert backend.metrics()["idle_done"] == 0
    backend.close()


def grown(turn: int) -> GenerationRequest:
    """The first turn's prompt and more, so that all that is reused is its exact head."""
    more = np.random.default_rng(200 + turn).integers(3, 250, 20).tolist()
    return replace(request(0), prompt_ids=[*request(0).prompt_ids, *more])


def test_exact_reuse_of_fresh_contexts_is_neither_forbidden_nor_a_reason_for_trust(
    backend: TorchBackend,
) -> None:
    key = ContextKey(backend.fingerprint, "default", "reflexion")
    guard = backend._runtime.guard
    assert guard is not None
    answer(backend, 0)
    guard.record(key, 9.0, now=time())
    *_, old = backend.generate(grown(1))
    assert old.receipt is not None and old.receipt.reason == "guard"  # stored before the verdict
    for turn in range(2, 6):
        *_, fresh = backend.generate(grown(turn))
        assert fresh.receipt is not None and fresh.receipt.exact
        assert fresh.receipt.reused_tokens >= len(request(0).prompt_ids)
        assert backend.settle(60)
    assert guard.tripped_at(key) is not None
    assert answer(backend, 1).reason == "guard"  # approximate, so still forbidden


def test_checks_that_never_ran_hold_nothing_once_the_backend_is_closed(
    folder: Path, support: Callable[[str], ModuleType]
) -> None:
    until = support("waiting").until
    store, held = MemoryStore(1 << 28), Event()
    backend = TorchBackend(str(folder), device="cpu", store=store, guard_every=1)
    answer(backend, 0)
    key = ContextKey(backend.fingerprint, "default", "reflexion")
    assert backend._runtime.guard is not None
    backend._runtime.guard.record(key, 9.0, now=0.0)  # so that what is stored may be tried again

    def hold(job: Job) -> None:
        job.emit(0)
        held.wait(60)

    started = backend._queue.stream(hold)
    assert next(started) == 0
    last = backend.generate(request(1))
    asked = Thread(target=lambda: list(last))
    asked.start()
    assert until(lambda: backend._queue.waiting == 1)

    def block(job: Job) -> None:
        job.cancelled.wait(60)

    blocked = backend._queue.stream(block)
    after = Thread(target=lambda: list(blocked))
    after.start()
    assert until(lambda: backend._queue.waiting == 2)
    held.set()
    asked.join()
    assert backend.metrics()["idle_waiting"] == 1  # behind the last one
    backend.close()
    after.join()
    assert store.remove(store.contexts()) > 0
    assert store.contexts() == []  # `remove` leaves what is leased
