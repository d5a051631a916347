"""The SSD study on a tiny model and a store on disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import median
from types import ModuleType

import pytest

from cacheslide_agents.bench.results import read_json
from cacheslide_agents.bench.studies import run_study
from torch_cacheslide import TorchBackend


def test_everything_stored_is_read_back_and_the_ratios_are_those_of_the_rows(
    tiny_model: str, tmp_path: Path, support: Callable[[str], ModuleType]
) -> None:
    data = support("tiny_data").write_tiny_data(tmp_path / "data")
    out = tmp_path / "ssd.json"
    backend = TorchBackend(tiny_model, device="cpu")
    found = run_study(
        "ssd",
        data=data,
        backend=backend,
        out=out,
        tasks=("memgpt",),
        limit=1,
        repeats=2,
        folder=str(tmp_path),
    )
    assert read_json(out) == found
    assert len(found["rows"]) == 2
    config = read_json(Path(tiny_model) / "config.json")
    numbers = backend.layers * config["num_key_value_heads"] * config["head_dim"]
    token_bytes = 2 * numbers * 4
    for row in found["rows"]:
        assert row["outcome"] in ("hit", "partial")
        stored, rest = divmod(row["loaded_bytes"], token_bytes)
        assert rest == 0 and stored >= 0.5 * row["prompt_tokens"]
        assert row["file_bytes"] >= row["loaded_bytes"]
    assert found["ttft_speedup"] == pytest.approx(
        median(row["recompute_ttft_s"] / row["ssd_ttft_s"] for row in found["rows"])
    )
    speeds = [
        row["loaded_bytes"] / row["store_read_s"] * row["plain_read_s"] / row["file_bytes"]
        for row in found["rows"]
    ]
    assert found["read_ratio"] == pytest.approx(median(speeds))
    backend.close()
