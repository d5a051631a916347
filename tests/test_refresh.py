"""What a turn leaves for the next: refresh modes, dense refreshes, and work that gives way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from cacheslide_agents.backend import GenerationRequest
from cacheslide_agents.pages import ContextKey, LayerKV, MemoryStore, StoredContext
from cacheslide_agents.policies import CacheSlide, Recompute
from cacheslide_agents.selection import Boundary
from cacheslide_agents.streams import CallOff, Sink
from torch_cacheslide import TorchBackend
from torch_cacheslide.jobs import MOST_IDLE, Interrupt, Job, JobQueue

POLICY = CacheSlide(selector=Boundary(16, min_run=16), may_decline=False)
HEAD, TAIL = (np.random.default_rng(seed).integers(3, 250, 80).tolist() for seed in (1, 2))
OLD, NEW = (np.random.default_rng(seed).integers(3, 250, 12).tolist() for seed in (3, 4))
BEFORE, AFTER = [*HEAD, *OLD, *TAIL], [*HEAD, *NEW, *TAIL]
CHANGED = slice(80, 92)
CORRECTED = slice(92, 108)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, support: Callable[[str], ModuleType]) -> Path:
    written: Path = support("tiny_models").write_model(
        tmp_path_factory.mktemp("tiny"),
        num_hidden_layers=3,
        max_position_embeddings=1024,
        initializer_range=0.3,
    )
    return written


@contextmanager
def opened(folder: Path, **options: Any) -> Iterator[TorchBackend]:
    backend = TorchBackend(str(folder), device="cpu", store=MemoryStore(1 << 28), **options)
    yield backend
    backend.close()


def turns(backend: TorchBackend) -> None:
    for ids in (BEFORE, AFTER):
        backend.warm(GenerationRequest(ids, session="agent", policy=POLICY))


def newest(backend: TorchBackend) -> StoredContext:
    key = ContextKey(backend.fingerprint, "default", "default")
    return backend.store.find(key, "agent")[0]


def last_layer(backend: TorchBackend, context: StoredContext) -> LayerKV:
    return backend.store.load(context, backend.layers - 1)


def dense(backend: TorchBackend, ids: list[int]) -> LayerKV:
    """The last layer of `ids`, computed densely in a namespace of its own."""
    backend.warm(GenerationRequest(ids, namespace="dense", policy=POLICY))
    key = ContextKey(backend.fingerprint, "dense", "default")
    return last_layer(backend, backend.store.find(key)[0])


def test_corrected_tokens_are_stored_anew_and_the_others_bit_for_bit_as_they_were(
    folder: Path,
) -> None:
    with opened(folder, refresh="corrected") as backend:
        turns(backend)
        now, before = last_layer(backend, newest(backend)), dense(backend, BEFORE)
        wanted = dense(backend, AFTER)
        for got, old, new in zip(now, before, wanted, strict=True):
            assert torch.equal(got[:, 108:-1], old[:, 108:-1])
            torch.testing.assert_close(got[:, : CORRECTED.stop], new[:, : CORRECTED.stop])
            assert not torch.allclose(got[:, CORRECTED], old[:, CORRECTED], atol=1e-4)


def test_with_never_the_old_keys_and_values_stay_and_are_not_called_exact(folder: Path) -> None:
    with opened(folder, refresh="never") as backend:
        turns(backend)
        context = newest(backend)
        now, before = last_layer(backend, context), dense(backend, BEFORE)
        wanted = dense(backend, AFTER)
        for got, old, new in zip(now, before, wanted, strict=True):
            assert torch.equal(got[:, 92:-1], old[:, 92:-1])
            torch.testing.assert_close(got[:, CHANGED], new[:, CHANGED])
    assert context.exact.tolist() == [True] * 92 + [False] * 80


def test_a_corrected_context_is_exact_up_to_its_first_uncorrected_token(folder: Path) -> None:
    with opened(folder) as backend:
        turns(backend)
        assert newest(backend).exact.tolist() == [True] * 108 + [False] * 64


def test_a_refresh_computes_the_newest_context_densely(folder: Path) -> None:
    with opened(folder) as backend:
        turns(backend)
        approximate = newest(backend)
        backend.refresh("agent")
        assert backend.settle(60)
        refreshed = newest(backend)
        assert refreshed is not approximate and refreshed.exact.all()
        assert refreshed.ids.tolist() == AFTER and refreshed.session == "agent"
        wanted = dense(backend, AFTER)
        for got, new in zip(last_layer(backend, refreshed), wanted, strict=True):
            assert torch.equal(got, new)
        assert backend.metrics()["refreshes"] == 1


def test_what_is_exact_already_or_unknown_is_not_refreshed(folder: Path) -> None:
    with opened(folder) as backend:
        backend.warm(GenerationRequest(BEFORE, session="agent", policy=POLICY))
        backend.refresh("agent")
        backend.refresh("nobody")
        assert backend.settle(60)
        assert backend.metrics()["idle_done"] == 0


def test_a_refresh_gives_way_to_a_request_within_a_layer_and_is_done_later(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(folder) as backend:
        turns(backend)
        entered, layers = Event(), []
        run = backend._runtime.stack.layer

        def slow(index: int, *rest: Any) -> torch.Tensor:
            layers.append(index)
            if not entered.is_set():
                entered.set()
                asked.wait(60)
            return run(index, *rest)

        asked = Event()
        monkeypatch.setattr(backend._runtime.stack, "layer", slow)
        backend.refresh("agent")
        assert entered.wait(60)
        answers = backend.generate(GenerationRequest([5, 6, 7], policy=Recompute()))
        begin = backend._queue._begin

        def begun(work: Callable[[Job], None], sink: Sink) -> CallOff:
            call_off = begin(work, sink)
            asked.set()
            return call_off

        monkeypatch.setattr(backend._queue, "_begin", begun)
        assert next(answers).token_ids
        assert layers[:4] == [0, 0, 1, 2]  # one layer of the refresh, then the request's
        list(answers)
        assert backend.settle(60)
        assert newest(backend).exact.all()
        assert backend.metrics()["idle_abandoned"] == 1


def test_idle_work_waits_for_every_request_in_the_queue(
    support: Callable[[str], ModuleType],
) -> None:
    queue, order = JobQueue("test"), []
    started, release = Event(), Event()

    def first(job: Job) -> None:
        started.set()
        release.wait(60)
        order.append("first")

    def second(job: Job) -> None:
        order.append("second")

    items = [queue.stream(first), queue.stream(second)]
    threads = [Thread(target=list, args=(each,)) for each in items]
    threads[0].start()
    assert started.wait(60)
    queue.idle("work", lambda interrupt: order.append("idle"))
    threads[1].start()
    assert support("waiting").until(lambda: queue.waiting == 1)
    release.set()
    assert queue.settle(60)
    for thread in threads:
        thread.join()
    queue.close()
    assert order == ["first", "second", "idle"]


def test_idle_work_is_taken_once_per_key_and_only_so_much_of_it() -> None:
    queue, hold = JobQueue("test"), Event()

    def wait(interrupt: Interrupt) -> None:
        hold.wait(60)

    assert queue.idle(0, wait)
    assert not queue.idle(0, wait)
    assert all(queue.idle(key, wait) for key in range(1, MOST_IDLE))
    assert not queue.idle("one too many", wait)
    hold.set()
    assert queue.settle(60)
    assert queue.counts()["idle_done"] == MOST_IDLE
    queue.close()


def test_idle_work_that_fails_is_logged_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    queue = JobQueue("test")

    def fail(interrupt: Interrupt) -> None:
        raise ValueError("no luck")

    queue.idle("unlucky", fail)
    assert queue.settle(60)
    assert queue.counts()["idle_failed"] == 1
    assert "idle work unlucky failed" in caplog.text
    queue.close()


def test_closing_drops_idle_work_and_ends_what_runs() -> None:
    queue, started = JobQueue("test"), Event()

    def run(interrupt: Interrupt) -> None:
        started.set()
        while True:
            interrupt()

    ran: list[str] = []
    queue.idle("runs", run)
    queue.idle("waits", lambda interrupt: ran.append("waits"))
    assert started.wait(60)
    queue.close()
    assert queue.settle(1) and ran == []
    assert not queue.idle("late", run)
