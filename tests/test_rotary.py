"""`Rotary` against transformers' own rotary modules, and against the algebra of rotations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from cacheslide_agents.errors import UnsupportedModelError
from cacheslide_agents.position import Rotary

SIZES = dict(hidden_size=192, num_attention_heads=3, max_position_embeddings=4096)
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    "yarn untruncated": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
        "truncate": False,
        "beta_fast": 24.0,
        "beta_slow": 2.0,
    },
    "yarn mscale": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 1024,
        "mscale": 0.8,
        "mscale_all_dim": 0.5,
    },
    "yarn attention factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
        "attention_factor": 1.75,
    },
}


def new_spelling(scaling: dict[str, Any]) -> dict[str, Any]:
    return {**SIZES, "rope_parameters": {**scaling, "rope_theta": 50_000.0}}


def old_spelling(scaling: dict[str, Any]) -> dict[str, Any]:
    renamed = {"type" if key == "rope_type" else key: value for key, value in scaling.items()}
    return {**SIZES, "rope_theta": 50_000.0, "rope_scaling": renamed}


def reference(scaling: dict[str, Any]) -> LlamaRotaryEmbedding:
    return LlamaRotaryEmbedding(LlamaConfig(**new_spelling(scaling)))


def keys_of(heads: int, tokens: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(heads * tokens)
    return torch.randn(heads, tokens, 64, generator=generator, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
@pytest.mark.parametrize("spell", [new_spelling, old_spelling], ids=["new", "old"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_cos_and_sin_equal_those_of_transformers_to_the_bit(
    scaling: dict[str, Any], spell: Any, dtype: torch.dtype
) -> None:
    positions = torch.tensor([0, 1, 17, 1023, 1024, 4095])
    model = reference(scaling)
    cos, sin = model(torch.empty(0, dtype=dtype), positions[None])

    rotary = Rotary.from_config(spell(scaling))
    got_cos, got_sin = rotary.cos_sin(positions, dtype)

    assert torch.equal(rotary.inv_freq, model.inv_freq)
    assert rotary.head_dim == 64
    assert rotary.attention_scaling == model.attention_scaling
    assert torch.equal(got_cos, cos[0]) and torch.equal(got_sin, sin[0])


def test_a_loaded_transformers_config_is_read_as_it_is() -> None:
    config = LlamaConfig(**old_spelling(SCALINGS["yarn"]))
    assert torch.equal(
        Rotary.from_config(config).inv_freq, Rotary.from_config(config.to_dict()).inv_freq
    )
    assert torch.equal(Rotary.from_config(config).inv_freq, LlamaRotaryEmbedding(config).inv_freq)


def test_the_pretraining_window_outside_the_rope_dict_wins_as_in_transformers() -> None:
    fields = new_spelling({"rope_type": "yarn", "factor": 4.0})
    fields["original_max_position_embeddings"] = 512
    config = LlamaConfig(**fields)
    rotary = Rotary.from_config(fields)
    assert torch.equal(rotary.inv_freq, LlamaRotaryEmbedding(config).inv_freq)


def test_yarn_without_a_factor_takes_the_ratio_of_the_windows() -> None:
    scaling = {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 1024}
    stated = {**scaling, "factor": 4.0}
    derived = Rotary.from_config(new_spelling(scaling))
    assert torch.equal(derived.inv_freq, reference(stated).inv_freq)
    assert derived.attention_scaling == reference(stated).attention_scaling


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["default", "yarn"])
def test_rotated_keys_equal_apply_rotary_pos_emb_to_the_bit(name: str, dtype: torch.dtype) -> None:
    rotary = Rotary.from_config(new_spelling(SCALINGS[name]))
    keys = keys_of(3, 300, dtype)
    cos, sin = rotary.cos_sin(torch.arange(900, 1200), dtype)
    _, expected = apply_rotary_pos_emb(keys[None], keys[None], cos[None], sin[None])

    before = keys.clone()
    assert torch.equal(rotary.rotate(keys, cos, sin), expected[0])
    assert torch.equal(keys, before)

    out = torch.full_like(keys, float("nan"))
    assert rotary.rotate(keys, cos, sin, out=out) is out
    assert torch.equal(out, expected[0])

    assert rotary.rotate(keys, cos, sin, out=keys) is keys
    assert torch.equal(keys, expected[0])


def test_a_strided_slot_takes_the_result_and_nothing_beside_it() -> None:
    rotary = Rotary.from_config(new_spelling(SCALINGS["default"]))
    keys = keys_of(3, 20)
    cos, sin = rotary.cos_sin(np.arange(5, 25))
    slots = torch.zeros(3, 50, 64)
    rotary.rotate(keys, cos, sin, out=slots[:, 10:30])
    assert torch.equal(slots[:, 10:30], rotary.rotate(keys, cos, sin))
    assert not slots[:, :10].any() and not slots[:, 30:].any()


def test_batched_keys_and_no_keys_at_all_are_rotated() -> None:
    rotary = Rotary.from_config(new_spelling(SCALINGS["default"]))
    cos, sin = rotary.cos_sin(torch.arange(7))
    batch = torch.stack([keys_of(3, 7), keys_of(3, 7) + 1])
    assert torch.equal(rotary.rotate(batch, cos, sin)[1], rotary.rotate(batch[1], cos, sin))
    cos, sin = rotary.cos_sin(torch.arange(0))
    assert rotary.rotate(keys_of(3, 0), cos, sin).shape == (3, 0, 64)


@pytest.mark.parametrize("name", ["default", "linear", "llama3", "yarn"])
def test_unrotate_undoes_rotate_attention_scaling_included(name: str) -> None:
    rotary = Rotary.from_config(new_spelling(SCALINGS[name]))
    cos, sin = rotary.cos_sin(torch.arange(1500, 1600), torch.float64)
    keys = keys_of(3, 100, torch.float64)
    back = rotary.unrotate(rotary.rotate(keys, cos, sin), cos, sin)
    torch.testing.assert_close(back, keys, rtol=0, atol=1e-14)


def test_unrotate_widens_narrow_keys_before_it_turns_them() -> None:
    rotary = Rotary.from_config(new_spelling(SCALINGS["yarn"]))
    keys = keys_of(3, 100, torch.bfloat16)
    cos, sin = rotary.cos_sin(torch.arange(100))
    got = rotary.unrotate(keys, cos, sin)
    assert got.dtype == torch.float32
    exact = rotary.unrotate(keys, *rotary.cos_sin(torch.arange(100), torch.float64))
    torch.testing.assert_close(got, exact.float(), rtol=0, atol=2e-5)


def test_moving_a_run_twice_equals_moving_it_once() -> None:
    rotary = Rotary.from_config(new_spelling(SCALINGS["llama3"]))
    keys = keys_of(3, 50, torch.float64)
    here, there = torch.arange(100, 150), torch.full((50,), 230)
    once = rotary.rotate(keys, *rotary.cos_sin(here + there, torch.float64))
    twice = rotary.rotate(
        rotary.rotate(keys, *rotary.cos_sin(here, torch.float64)),
        *rotary.cos_sin(there, torch.float64),
    )
    torch.testing.assert_close(twice, once, rtol=0, atol=1e-12)


def test_a_query_sees_a_moved_key_at_its_new_distance_only() -> None:
    rotary = Rotary.from_config(new_spelling(SCALINGS["default"]))
    query, key = keys_of(1, 1, torch.float64), keys_of(1, 2, torch.float64)[:, 1:]

    def score(query_at: int, key_at: int) -> Tensor:
        turned = [
            rotary.rotate(vector, *rotary.cos_sin(torch.tensor([place]), torch.float64))
            for vector, place in ((query, query_at), (key, key_at))
        ]
        return (turned[0] * turned[1]).sum()

    torch.testing.assert_close(score(900, 700), score(300, 100), rtol=0, atol=1e-11)


DEFAULT = new_spelling(SCALINGS["default"])
REFUSED = {
    "dynamic NTK": new_spelling({"rope_type": "dynamic", "factor": 2.0}),
    "longrope": new_spelling({"rope_type": "longrope", "factor": 2.0}),
    "'spiral'": new_spelling({"rope_type": "spiral"}),
    "M-RoPE": new_spelling({"rope_type": "default", "mrope_section": [8, 12, 12]}),
    "rotary_pct=0.25": {**DEFAULT, "rotary_pct": 0.25},
    "partial_rotary_factor=0.5": new_spelling(
        {"rope_type": "default", "partial_rotary_factor": 0.5}
    ),
    "interleaved": {**DEFAULT, "model_type": "cohere"},
    "rope_interleave": {**DEFAULT, "rope_interleave": True},
    "latent attention": {**DEFAULT, "qk_rope_head_dim": 32},
    "no_rope_layers": {**DEFAULT, "no_rope_layers": [1, 1, 1, 0]},
    "full_attention, sliding_attention": {
        **DEFAULT,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "differ between layer types": {
        **SIZES,
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}},
    },
    "'rope_theta'": dict(SIZES),
    "'factor'": new_spelling({"rope_type": "linear"}),
    "'hidden_size'": {"rope_theta": 1e4},
    "odd": {**DEFAULT, "head_dim": 63},
}


@pytest.mark.parametrize(("named", "config"), REFUSED.items(), ids=REFUSED)
def test_what_rotary_cannot_move_is_refused_by_name(named: str, config: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        Rotary.from_config(config)


def test_layers_that_all_rotate_alike_are_not_refused() -> None:
    config = {**DEFAULT, "no_rope_layers": [1, 1], "layer_types": ["full_attention"] * 2}
    assert torch.equal(Rotary.from_config(config).inv_freq, reference(SCALINGS["default"]).inv_freq)
