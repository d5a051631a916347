"""The length study on a tiny random model: prompts of the asked length, one edit of fixed size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cacheslide_agents.bench import run_study
from cacheslide_agents.errors import DataError
from torch_cacheslide import TorchBackend

SENTENCES = " ".join(f"Sentence {number} speaks of item {number * 7}." for number in range(900))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "valid.jsonl").write_text(json.dumps({"text": SENTENCES}) + "\n")
    return tmp_path


def test_longer_prompts_with_the_same_edit_compute_a_smaller_share(
    data: Path, tiny_model: str
) -> None:
    backend = TorchBackend(tiny_model, device="cpu")
    out = data / "length.json"
    run_study("length", data=data, backend=backend, out=out, tokens=(400, 1600), limit=1)
    backend.close()
    found: dict[str, Any] = json.loads(out.read_text())
    assert (found["schema"], found["study"]) == (1, "length")
    by_length = {
        (point["tokens"], point["policy"]): point["compute_fraction"] for point in found["points"]
    }
    assert by_length[400, "recompute"] == by_length[1600, "recompute"] == 1.0
    assert by_length[1600, "cacheslide"] < by_length[400, "cacheslide"]
    assert by_length[1600, "cacheslide"] < by_length[1600, "prefix"]


def test_text_that_is_too_short_for_a_length_is_a_data_error(data: Path, tiny_model: str) -> None:
    (data / "text" / "valid.jsonl").write_text(json.dumps({"text": "Too short."}) + "\n")
    backend = TorchBackend(tiny_model, device="cpu")
    with pytest.raises(DataError, match="400 tokens"):
        run_study("length", data=data, backend=backend, tokens=(400,), limit=1)
    backend.close()
