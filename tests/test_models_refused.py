"""Models that are refused: what would be computed wrongly, and what is damaged."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from cacheslide_agents.errors import ModelLoadError, UnsupportedModelError
from torch_cacheslide.models import load_model


@pytest.fixture
def tiny(support: Callable[[str], ModuleType]) -> Any:
    return support("tiny_models")


UNSUPPORTED: list[tuple[Any, dict[str, Any], str]] = [
    (LlamaConfig, {"model_type": "gemma"}, "model_type 'gemma'"),
    (LlamaConfig, {"quantization_config": {"quant_method": "awq"}}, "quantised with 'awq'"),
    (MistralConfig, {"sliding_window": 64}, "sliding-window attention over 64 of 128"),
    (
        Qwen2Config,
        {
            "use_sliding_window": True,
            "sliding_window": 64,
            "layer_types": ["full_attention", "sliding_attention"],
        },
        "sliding-window",
    ),
    (Qwen3Config, {"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
    (
        Qwen3Config,
        {
            "use_sliding_window": True,
            "sliding_window": 128,
            "layer_types": ["full_attention", "linear_attention"],
        },
        "layers of type linear_attention",
    ),
    (
        LlamaConfig,
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        "dynamic",
    ),
    (LlamaConfig, {"partial_rotary_factor": 0.5}, "partial rotary"),
]


@pytest.mark.parametrize(("kind", "changes", "reason"), UNSUPPORTED)
def test_what_cannot_be_computed_rightly_is_refused_before_weights_are_read(
    tiny: Any, tmp_path: Path, kind: Any, changes: dict[str, Any], reason: str
) -> None:
    tiny.write_model(tmp_path, kind)
    tiny.edit_config(tmp_path, **changes)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        load_model(tmp_path)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (MistralConfig, {"sliding_window": 128}),
        (MistralConfig, {"sliding_window": None}),
        (Qwen2Config, {"use_sliding_window": False, "sliding_window": 64}),
    ],
)
def test_a_sliding_window_that_is_never_in_force_is_accepted(
    tiny: Any, tmp_path: Path, kind: Any, changes: dict[str, Any]
) -> None:
    tiny.write_model(tmp_path, kind)
    tiny.edit_config(tmp_path, **changes)
    assert load_model(tmp_path).model.config.model_type == kind.model_type


def _without(*names: str) -> Callable[[Any, Path], None]:
    def damage(_: Any, folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return damage


def _truncated(_: Any, folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _garbled(_: Any, folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 1 << 62) + path.read_bytes()[8:])


def _pickled(_: Any, folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _shard_missing(_: Any, folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    weight_map = {"lm_head.weight": "model-00001-of-00002.safetensors"}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))


def _bad_json(_: Any, folder: Path) -> None:
    (folder / "config.json").write_text("{")


def _not_finite(tiny: Any, folder: Path) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = float("nan")

    tiny.edit_weights(folder, edit)


def _other_shape(tiny: Any, folder: Path) -> None:
    tiny.edit_weights(folder, lambda tensors: tensors.update({"lm_head.weight": torch.ones(7, 32)}))


def _tensor_missing(tiny: Any, folder: Path) -> None:
    tiny.edit_weights(folder, lambda tensors: tensors.pop("model.norm.weight"))


def _layer_too_many(tiny: Any, folder: Path) -> None:
    tiny.edit_config(folder, num_hidden_layers=1)


def _small_vocabulary(tiny: Any, folder: Path) -> None:
    tiny.edit_config(folder, vocab_size=258)


DAMAGES: dict[str, tuple[Callable[[Any, Path], None], str]] = {
    "no config": (_without("config.json"), r"has no config\.json"),
    "config is no JSON": (_bad_json, r"config\.json cannot be read as JSON"),
    "no weights": (_without("model.safetensors"), "has no weights"),
    "pickled weights": (_pickled, "rewrite them as safetensors"),
    "shard missing": (_shard_missing, "model-00001-of-00002"),
    "truncated": (_truncated, r"model\.safetensors has \d+ bytes but its header speaks of"),
    "garbled head": (_garbled, "not a safetensors file"),
    "NaN": (_not_finite, r"model\.layers\.1\.mlp\.up_proj\.weight is NaN"),
    "tensor missing": (_tensor_missing, r"lacks 1 tensors \(model\.norm\.weight\)"),
    "tensor of another shape": (_other_shape, r"wrongly shaped 1 tensors \(lm_head\.weight\)"),
    "tensors of an unknown layer": (_layer_too_many, "holds unknown 9 tensors"),
    "no tokenizer": (_without("tokenizer.json", "tokenizer_config.json"), "has no tokenizer"),
    "foreign tokenizer": (_small_vocabulary, "has ids up to 258 but the model embeds only 258"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder_is_refused_with_its_path_and_the_damage(
    tiny: Any, tmp_path: Path, damage: str
) -> None:
    inflict, message = DAMAGES[damage]
    inflict(tiny, tiny.write_model(tmp_path))
    with pytest.raises(ModelLoadError, match=message) as caught:
        load_model(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_weights_too_large_for_float16_are_refused_with_the_mend(tiny: Any, tmp_path: Path) -> None:
    tiny.write_model(tmp_path)
    tiny.edit_weights(tmp_path, lambda tensors: tensors["model.norm.weight"].fill_(1e6))
    assert load_model(tmp_path, dtype="bfloat16").model.dtype == torch.bfloat16
    with pytest.raises(ModelLoadError, match=r"model\.norm\.weight .* use dtype='bfloat16'"):
        load_model(tmp_path, dtype="float16")
