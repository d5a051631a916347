"""The decoupling study on a tiny model and a store on disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import median
from types import ModuleType

import pytest

from cacheslide_agents.bench.results import read_json, write_json
from cacheslide_agents.bench.studies import run_study
from cacheslide_agents.bench.studies.decoupling import FIELDS, PLACES, WAYS, drop_page_cache
from cacheslide_agents.bench.studies.reopen import reopened
from cacheslide_agents.errors import BackendError
from torch_cacheslide import TorchBackend


def test_every_way_is_measured_from_ssd_and_from_memory(
    tiny_model: str, tmp_path: Path, support: Callable[[str], ModuleType]
) -> None:
    data = support("tiny_data").write_tiny_data(tmp_path / "data")
    out = tmp_path / "decoupling.json"
    backend = TorchBackend(tiny_model, device="cpu")
    options = {"data": data, "backend": backend, "out": out, "limit": 1, "folder": str(tmp_path)}
    found = run_study("decoupling", tasks=("memgpt",), repeats=1, **options)
    assert read_json(out) == found
    assert len(found["rows"]) == len(WAYS) * len(PLACES)
    assert all(row["outcome"] in ("hit", "partial") for row in found["rows"])
    assert set(found["on"]) == set(found["off"]) == set(FIELDS)
    assert found["on"] == found["places"]["ssd"]["on"]
    for row in found["rows"]:
        assert 0.0 < row["wait_s"] + row["compute_s"] <= row["ttft_s"]
        assert row["way"] != "inline" or row["wait_s"] == row["load_s"]
    inline = found["places"]["memory"]["inline"]
    assert inline["arena_ttft_s"] == pytest.approx(inline["ttft_s"] - inline["wait_s"])

    rows = [row | {"ttft_s": 9.0} for row in found["rows"]]
    write_json(out, found | {"rows": rows})
    again = run_study("decoupling", resume=True, tasks=("memgpt",), repeats=2, **options)
    assert again["rows"][: len(rows)] == rows
    assert len(again["rows"]) == 2 * len(rows)
    on = [row["ttft_s"] for row in again["rows"] if (row["way"], row["place"]) == ("on", "ssd")]
    assert again["on"]["ttft_s"] == median(on)
    backend.close()


def test_dropping_the_page_cache_leaves_the_files_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("a", "sub/b"):
        (tmp_path / name).write_bytes(name.encode() * 5000)
    drop_page_cache(tmp_path)
    assert (tmp_path / "sub" / "b").read_bytes() == b"sub/b" * 5000


def test_only_a_model_from_files_can_be_opened_again(
    support: Callable[[str], ModuleType],
) -> None:
    class Served:
        model_id = "served"

    with (
        pytest.raises(BackendError, match="served cannot be loaded again"),
        reopened(Served()),  # type: ignore[arg-type]
    ):
        pass
