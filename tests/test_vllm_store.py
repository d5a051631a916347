"""The page store's SSD tier on vLLM: spilled, found again by the next engine, and in trouble.

Engines run in processes of their own, with two tensor-parallel ranks where there are two devices;
tests reach into the workers by functions that they send.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from time import sleep
from types import ModuleType
from typing import Any
from uuid import uuid4

import pytest
import torch

from cacheslide_agents.errors import StoreError
from cacheslide_agents.policies import CacheSlide, Recompute

REUSE = CacheSlide(may_decline=False)
FILLERS = count(1000)
LENGTH = 700
"""Tokens of a prompt: 1.4 MB over all ranks."""

pytestmark = [
    pytest.mark.timeout(1200),
    pytest.mark.filterwarnings("ignore"),  # vLLM's and its packages' own
]


@dataclass
class Bench:
    """An engine with a store folder, and what the engine before it answered."""

    backend: Any
    lab: ModuleType
    folder: Path
    ranks: int
    namespace: str
    before: Any

    def keep(self, seed: int, namespace: str) -> None:
        """Ask, and wait until every rank has stored the context."""
        puts = self.backend.metrics()["puts"]
        ids = self.lab.turns(seed, LENGTH)[0]
        self.lab.ask(self.backend, self.lab.request(ids, REUSE, namespace=namespace, retain=True))
        for _ in range(10_000):
            if self.backend.metrics()["puts"] > puts:
                return
            sleep(0.01)
        raise AssertionError("the context was not stored")

    def moved(self, seed: int, namespace: str, policy: Any = REUSE) -> Any:
        """The answer to the turn that follows, which is not kept."""
        ids = self.lab.turns(seed, LENGTH)[1]
        return self.lab.ask(self.backend, self.lab.request(ids, policy, namespace=namespace))

    def spill(self) -> None:
        """Fill the memory with other contexts."""
        for _ in range(3):
            self.keep(next(FILLERS), "fill")

    def files(self) -> list[Path]:
        return sorted(self.folder.glob("rank-*/extents/*.pages"))


def options(folder: Path, ranks: int) -> dict[str, Any]:
    return {
        "store_path": folder,
        "store_bytes": (2 << 20) // ranks,
        "tensor_parallel_size": ranks,
        "max_num_batched_tokens": 2048,
    }


@pytest.fixture(scope="module")
def bench(lab: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """The second engine on a folder; the first one has stored a context there."""
    from vllm.envs import disable_envs_cache

    ranks = 1 if torch.cuda.device_count() == 1 else 2
    folder, namespace = tmp_path_factory.mktemp("store"), uuid4().hex
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
        disable_envs_cache()
        first = lab.start(str(lab.tiny_model()), options(folder, ranks))
        try:
            earlier = Bench(first, lab, folder, ranks, namespace, None)
            earlier.keep(1, namespace)
            before = earlier.moved(1, namespace)
        finally:
            first.close()
        second = lab.start(str(lab.tiny_model()), options(folder, ranks))
    made = Bench(second, lab, folder, ranks, namespace, before)
    yield made
    second.close()
    made.backend = None
    del first, earlier, second
    gc.collect()  # here, where warnings are ignored: vLLM leaves contexts of zmq open


def fallbacks(bench: Bench, reason: str) -> float:
    return float(bench.backend.metrics().get(f"fallback_{reason}", 0.0))


def assert_dense(answer: Any, reason: str, dense: Any) -> None:
    assert answer.receipt.outcome == "fallback"
    assert reason in answer.receipt.reason
    assert answer.receipt.reused_tokens == 0
    assert answer.equals(dense)


def prefetch(worker: Any, depth: int | None) -> None:
    worker._working()._prefill.layers._prefetch = depth


def poison(worker: Any) -> None:
    """NaN in one page, in memory, of the newest context of this rank."""
    store = worker._working().store
    entry = store._holdings.catalog.entries()[-1]
    arena = store._holdings.host.arena(entry.geometry)
    block = entry.blocks[len(entry.blocks) // 2]
    arena.page(block.slot, 2).view("float32")[:] = float("nan")


def test_the_next_engine_finds_the_contexts_of_the_last(bench: Bench) -> None:
    """Asked first, so it is what the folder held and not what this engine has stored since."""
    again = bench.moved(1, bench.namespace)
    assert bench.before.receipt.outcome == again.receipt.outcome == "partial"
    assert again.receipt.reused_tokens == bench.before.receipt.reused_tokens
    assert again.equals(bench.before)
    assert bench.moved(1, uuid4().hex).receipt.outcome == "cold"


def test_every_rank_has_a_folder_of_its_own(bench: Bench) -> None:
    names = [f"rank-{rank}" for rank in range(bench.ranks)]
    assert sorted(path.name for path in bench.folder.iterdir()) == names
    assert {path.parent.parent.name for path in bench.files()} == set(names)


def test_reuse_from_ssd_equals_reuse_from_memory(bench: Bench) -> None:
    namespace = uuid4().hex
    bench.keep(2, namespace)
    from_memory = bench.moved(2, namespace)
    bench.spill()
    before = bench.backend.metrics()
    from_ssd = bench.moved(2, namespace)
    after = bench.backend.metrics()
    assert from_memory.receipt.outcome == from_ssd.receipt.outcome == "partial"
    assert from_ssd.equals(from_memory)
    assert after["ssd_read_bytes"] > before["ssd_read_bytes"]
    assert after["memory_bytes"] <= (2 << 20) // bench.ranks < after["ssd_bytes"]


def test_layers_read_ahead_are_those_read_when_they_are_due(bench: Bench) -> None:
    namespace = uuid4().hex
    bench.keep(8, namespace)
    answers = []
    for depth in (0, 1, None):
        bench.spill()
        bench.lab.on_ranks(bench.backend, partial(prefetch, depth=depth))
        answers.append(bench.moved(8, namespace))
    first, *others = answers
    assert first.receipt.outcome == "partial"
    assert all(answer.equals(first) for answer in others)


def assert_left_to_vllm(answer: Any, dense: Any) -> None:
    """No context is known any more; vLLM itself still has the first tokens of the turn before."""
    assert (answer.receipt.outcome, answer.receipt.reason) == ("partial", "prefix_cache")
    assert answer.receipt.exact
    assert answer.tokens == dense.tokens


def test_a_page_file_that_is_not_as_it_was_written(bench: Bench) -> None:
    namespace = uuid4().hex
    dense = bench.moved(3, namespace, Recompute())
    sound = set(bench.files())
    bench.keep(3, namespace)
    bench.spill()
    before = fallbacks(bench, "PageError")
    for path in set(bench.files()) - sound:
        content = bytearray(path.read_bytes())
        content[4096:] = bytes(byte ^ 1 for byte in content[4096:])
        path.write_bytes(content)
    assert_dense(bench.moved(3, namespace), "PageError", dense)
    assert fallbacks(bench, "PageError") == before + 1
    assert bench.backend.metrics()["misses_torn"] >= 1
    assert_left_to_vllm(bench.moved(3, namespace), dense)


def test_nan_in_a_page_in_memory(bench: Bench) -> None:
    namespace = uuid4().hex
    dense = bench.moved(4, namespace, Recompute())
    bench.keep(4, namespace)
    bench.lab.on_ranks(bench.backend, poison)
    before = fallbacks(bench, "NonFiniteError")
    assert_dense(bench.moved(4, namespace), "NonFiniteError", dense)
    assert fallbacks(bench, "NonFiniteError") == before + 1
    assert_left_to_vllm(bench.moved(4, namespace), dense)


def test_a_store_folder_that_goes_while_it_is_used(bench: Bench) -> None:
    namespace = uuid4().hex
    dense = bench.moved(5, namespace, Recompute())
    bench.keep(5, namespace)
    bench.spill()
    away = bench.folder.with_name("away")
    os.rename(bench.folder, away)
    try:
        assert_dense(bench.moved(5, namespace), "PageError", dense)
        bench.spill()
        other = uuid4().hex
        bench.keep(6, other)
        assert bench.moved(6, other).receipt.outcome == "partial"
        assert bench.backend.metrics()["write_failures"] >= 1
    finally:
        os.rename(away, bench.folder)
    bench.keep(5, namespace)
    assert bench.moved(5, namespace).receipt.outcome == "partial"


def test_the_next_turn_of_a_session_takes_the_place_of_its_last(bench: Bench) -> None:
    """And the scheduler plans on the new one at once."""
    namespace = uuid4().hex
    ids = bench.lab.turns(7, LENGTH)[0]
    answers = []
    for extra in range(3):
        asked = bench.lab.request(
            ids[:100] + [9] * extra + ids[100:], REUSE, namespace=namespace, retain=True
        )
        answers.append(bench.lab.ask(bench.backend, replace(asked, session="agent")))
    assert [answer.receipt.outcome for answer in answers] == ["cold", "partial", "partial"]
    assert bench.backend.metrics()["superseded"] >= 2


def test_a_second_engine_on_the_folder_is_refused(bench: Bench) -> None:
    with pytest.raises(StoreError, match="is being written by process"):
        bench.lab.start(str(bench.lab.tiny_model()), options(bench.folder, bench.ranks))
