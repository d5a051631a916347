"""The SSD study on a tiny model and a store on disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

from cacheslide_agents.bench.results import read_json
from cacheslide_agents.bench.studies import run_study, ssd
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
    backend.close()


def test_ratios_are_medians_of_paired_rows() -> None:
    """Reading 90 bytes as fast as 100 plain ones in one row, half and a quarter as fast in two."""
    rows = [
        _row(recompute=6.0, ssd=2.0, store=1.0),
        _row(recompute=9.0, ssd=1.0, store=2.0),
        _row(recompute=8.0, ssd=2.0, store=4.0),
    ]
    found = ssd._study(SimpleNamespace(model_id="m"), rows)
    assert found["ttft_speedup"] == 4.0
    assert found["read_ratio"] == 0.9 / 2.0


def _row(*, recompute: float, ssd: float, store: float) -> dict[str, float]:
    return {
        "recompute_ttft_s": recompute,
        "ssd_ttft_s": ssd,
        "file_bytes": 100,
        "loaded_bytes": 90,
        "plain_read_s": 1.0,
        "store_read_s": store,
    }
