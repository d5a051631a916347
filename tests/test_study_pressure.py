"""The pressure study: real prompts and plans over a store that is too small, random keys."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from cacheslide_agents.bench.results import read_json
from cacheslide_agents.bench.studies import run_study
from cacheslide_agents.bench.studies.host import Host, Spent
from cacheslide_agents.chunks import EncodedPrompt, Role, Span
from cacheslide_agents.errors import DataError
from cacheslide_agents.pages import SlideStore
from torch_cacheslide import TorchBackend

GEOMETRY = (2, 1, 4)


def prompt(*parts: list[int]) -> EncodedPrompt:
    ids = [token for part in parts for token in part]
    spans, here = [], 0
    for number, part in enumerate(parts):
        role = Role.REUSE if number % 2 == 0 else Role.RECOMPUTE
        spans.append(Span(f"c{number}", role, here, here + len(part), str(part)))
        here += len(part)
    return EncodedPrompt(tuple(ids), tuple(spans), "", "task")


def drawn(seed: int, count: int) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(3, 5000, count).tolist()
    return ids


def test_a_host_reuses_what_the_last_turn_of_its_session_stored() -> None:
    with SlideStore(1 << 24) as store:
        host = Host(store, GEOMETRY, row_s=0.0)
        head, tail = drawn(1, 400), drawn(2, 600)
        cold = host.turn("a", "task", prompt(head, drawn(3, 20), tail))
        assert (cold.reused_tokens, cold.active_tokens) == (0, 1020)
        warm = host.turn("a", "task", prompt(head, drawn(4, 30), tail))
        assert warm.prompt_tokens == 1030
        assert warm.reused_tokens + warm.active_tokens == 1030
        assert warm.reused_tokens > 800
        other_task = host.turn("b", "other", prompt(head, drawn(5, 20), tail))
        assert other_task.reused_tokens == 0


def test_sums_of_turns_add_field_by_field() -> None:
    total = Spent(1, 2, 3, 0, 0.5, 0.25, 1.0) + Spent(10, 20, 30, 1, 0.5, 0.5, 2.0)
    assert total == Spent(11, 22, 33, 1, 1.0, 0.75, 3.0)


def test_each_eviction_runs_the_same_turns_under_a_quarter_of_the_memory(
    tiny_model: str, tmp_path: Path, support: Callable[[str], ModuleType]
) -> None:
    data = support("tiny_data").write_tiny_data(tmp_path / "data")
    backend = TorchBackend(tiny_model, device="cpu")
    options = {
        "data": data,
        "backend": backend,
        "sessions": (3,),
        "geometry": GEOMETRY,
        "folder": str(tmp_path),
    }
    out = tmp_path / "pressure.json"
    found = run_study("pressure", limit=2, out=out, **options)
    assert read_json(out) == found
    (run,) = found["runs"]
    assert run["sessions"] == 3
    assert run["budget_bytes"] == run["working_set_bytes"] // 4
    stores = [run[name] for name in ("slide", "lru_write_through", "lru_write_back")]
    for store in stores:
        assert store["bytes_written"] > 0 and store["fallbacks"] == 0
        assert 0.0 <= store["hit_rate"] < 1.0
        assert store["wait_s"] == store["load_wait_s"] + store["put_wait_s"]
    assert run["bytes_ratio"] == stores[1]["bytes_written"] / stores[0]["bytes_written"]
    held = run["bytes_held"]
    assert held["ratio_live"] == held["prompt_cache_live"] / held["ours"]
    assert held["prompt_cache_live"] <= held["prompt_cache_all"]
    assert found["simulated"]["scale"] == 2 * 1 * 4 * 8 / 46080

    assert run_study("pressure", limit=2, out=out, resume=True, **options) == found
    with pytest.raises(DataError, match="has 3 sessions of 2 turns, not 4"):
        run_study("pressure", limit=2, **{**options, "sessions": (4,)})
    backend.close()
