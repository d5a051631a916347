"""The fingerprint: what it tells apart, what it does not, and how little it reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

import pytest
import torch

from cacheslide_agents.weights import fingerprint as fingerprint_module
from cacheslide_agents.weights.fingerprint import SAMPLE_BYTES, file_digest, fingerprint
from torch_cacheslide.models import load_model


@pytest.fixture
def tiny(support: Callable[[str], ModuleType]) -> Any:
    return support("tiny_models")


def bump(name: str, *place: int) -> Callable[[dict[str, torch.Tensor]], None]:
    """Changes one number of one tensor a little."""

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name][place] += 1e-3

    return edit


def test_the_fingerprint_follows_the_weights_and_not_the_folder_or_the_shards(
    tiny: Any, tmp_path: Path
) -> None:
    one, same = tiny.write_model(tmp_path / "a"), tiny.write_model(tmp_path / "b")
    other = tiny.write_model(tmp_path / "c", seed=1)
    sharded = tmp_path / "sharded"
    load_model(one).model.save_pretrained(sharded, max_shard_size="10KB")
    assert len(list(sharded.glob("*.safetensors"))) > 1
    mark = fingerprint(one, torch.float32)
    assert fingerprint(same, torch.float32) == fingerprint(sharded, torch.float32) == mark
    assert load_model(one).fingerprint == mark
    assert fingerprint(other, torch.float32) != mark


def test_one_changed_number_config_and_dtype_are_told_apart(tiny: Any, tmp_path: Path) -> None:
    tiny.write_model(tmp_path)
    marks = {
        fingerprint(tmp_path, torch.float32),
        fingerprint(tmp_path, torch.bfloat16),
    }
    tiny.edit_weights(tmp_path, bump("model.layers.0.self_attn.k_proj.weight", 5, 7))
    marks.add(fingerprint(tmp_path, torch.float32))
    tiny.edit_config(tmp_path, rms_norm_eps=1e-3)
    marks.add(fingerprint(tmp_path, torch.float32))
    assert len(marks) == 4


def test_who_wrote_the_config_makes_no_difference(tiny: Any, tmp_path: Path) -> None:
    before = fingerprint(tiny.write_model(tmp_path), torch.float32)
    tiny.edit_config(tmp_path, transformers_version="4.0", _name_or_path="elsewhere")
    assert fingerprint(tmp_path, torch.float32) == before


def test_a_large_checkpoint_is_fingerprinted_from_a_bounded_sample(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.write_model(tmp_path, vocab_size=60_000, hidden_size=64)
    assert (tmp_path / "model.safetensors").stat().st_size > 1.5 * SAMPLE_BYTES
    lengths: list[int] = []
    read = fingerprint_module._read

    def counted(stream: BinaryIO, start: int, stop: int) -> bytes:
        lengths.append(stop - start)
        return read(stream, start, stop)

    monkeypatch.setattr(fingerprint_module, "_read", counted)
    before = fingerprint(tmp_path, torch.float32)
    assert 0 < sum(lengths) <= SAMPLE_BYTES
    tiny.edit_weights(tmp_path, bump("model.embed_tokens.weight", -1, -1))
    assert fingerprint(tmp_path, torch.float32) != before


def test_a_file_digest_follows_size_and_content(tmp_path: Path) -> None:
    contents = (b"", b"\0" * 9, b"\0" * 10, b"\0" * 9 + b"\1")
    digests = set()
    for content in contents:
        (tmp_path / "file").write_bytes(content)
        digests.add(file_digest(tmp_path / "file"))
    assert len(digests) == len(contents)
