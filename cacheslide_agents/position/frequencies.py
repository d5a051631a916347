"""How fast each pair of head dimensions turns, read from a model's configuration.

In: a Hugging Face config as a mapping (old `rope_scaling` or new `rope_parameters` spelling).
Out: inverse frequencies float32 [head_dim / 2] and the factor on cos and sin. Every operation is
in the order and precision of transformers' rotary modules, so that both agree bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from cacheslide_agents.errors import UnsupportedModelError

Frequencies = tuple[Tensor, float]

# Models that pair dimension 2i with 2i + 1 although no config field says so.
_INTERLEAVED_MODELS = {
    *("blt", "codegen", "cohere", "cohere2", "cohere2_moe", "deepseek_v2", "ernie4_5"),
    *("ernie4_5_moe", "glm", "glm4", "gptj", "helium", "llama4", "llama4_text", "moonshine"),
    "roformer",
}
# Field -> what it means when it is set.
_REFUSED_FIELDS = {
    "mrope_section": "M-RoPE (mrope_section) takes three positions a token",
    "qk_rope_head_dim": "multi-head latent attention (qk_rope_head_dim) rotates a separate key",
    "rope_interleave": "interleaved rotary (rope_interleave) pairs neighbouring dimensions",
    "rope_local_base_freq": "layer types with their own frequencies (rope_local_base_freq)",
    "rotary_dim": "partial rotary (rotary_dim) leaves some dimensions unrotated",
}
_PARTIAL_FIELDS = ("partial_rotary_factor", "rotary_pct")
_REFUSED_TYPES = {
    "dynamic": "dynamic NTK changes its frequencies with the prompt's length",
    "longrope": "longrope changes its frequencies with the prompt's length",
    "su": "longrope (su) changes its frequencies with the prompt's length",
    "mrope": "M-RoPE takes three positions a token",
}


def frequencies_of(config: Mapping[str, Any]) -> Frequencies:
    """Inverse frequencies float32 [head_dim / 2] and the attention scaling of `config`.

    Raises `UnsupportedModelError` for every scheme that is not default, linear, llama3 or yarn, for
    partial, interleaved, multi-axis or per-layer rotary, and for a missing field.
    """
    rope = _rope_parameters(config)
    _refuse(config, rope)
    rope_type = rope["rope_type"]
    if rope_type not in _SCHEMES:
        reason = _REFUSED_TYPES.get(rope_type, "only default, linear, llama3 and yarn are known")
        raise _unsupported(config, f"rope type {rope_type!r}: {reason}")
    try:
        return _SCHEMES[rope_type](rope, _head_dim(config))
    except KeyError as missing:
        raise _unsupported(
            config,
            f"rope type {rope_type!r} needs the field {missing}; pass the config that transformers "
            "loaded (config.to_dict())",
        ) from None


def _rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """Both spellings as one flat dict with `rope_type`, `rope_theta` and the scheme's fields."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise _unsupported(config, "rope_parameters differ between layer types")
    rope["rope_type"] = rope.get("rope_type") or rope.get("type") or "default"
    if rope.get("rope_theta") is None and config.get("rope_theta") is not None:
        rope["rope_theta"] = config["rope_theta"]
    window = config.get("max_position_embeddings")
    pretrained = config.get("original_max_position_embeddings")
    if pretrained is not None:
        rope["original_max_position_embeddings"] = pretrained
    elif window is not None:
        rope.setdefault("original_max_position_embeddings", window)
    if rope["rope_type"] == "yarn" and rope.get("factor") is None and window is not None:
        rope["factor"] = window / rope["original_max_position_embeddings"]
    return {key: value for key, value in rope.items() if value is not None}


def _refuse(config: Mapping[str, Any], rope: Mapping[str, Any]) -> None:
    fields = {**config, **rope}
    for field, reason in _REFUSED_FIELDS.items():
        if fields.get(field):
            raise _unsupported(config, reason)
    for field in _PARTIAL_FIELDS:
        share = fields.get(field)
        if share is not None and share != 1.0:
            raise _unsupported(
                config, f"partial rotary ({field}={share}) rotates only some dimensions"
            )
    if config.get("model_type") in _INTERLEAVED_MODELS:
        raise _unsupported(config, "interleaved rotary pairs neighbouring dimensions")
    layer_types = sorted(set(config.get("layer_types") or ()))
    if len(layer_types) > 1:
        raise _unsupported(config, f"layers of several types ({', '.join(layer_types)})")
    if not all(config.get("no_rope_layers") or ()):
        raise _unsupported(config, "some layers have no rotary positions (no_rope_layers)")


def _head_dim(config: Mapping[str, Any]) -> int:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    if head_dim % 2:
        raise _unsupported(config, f"head_dim {head_dim} is odd and cannot be rotated in pairs")
    return int(head_dim)


def _unsupported(config: Mapping[str, Any], reason: str) -> UnsupportedModelError:
    model = config.get("_name_or_path") or config.get("model_type") or "this model"
    return UnsupportedModelError(f"cannot move the keys of {model}: {reason}")


def _default(rope: Mapping[str, Any], dim: int) -> Frequencies:
    return 1.0 / _wavelengths(rope, dim), 1.0


def _wavelengths(rope: Mapping[str, Any], dim: int) -> Tensor:
    """Tokens per radian, [dim / 2]."""
    exponents: Tensor = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    return torch.pow(rope["rope_theta"], exponents)


def _linear(rope: Mapping[str, Any], dim: int) -> Frequencies:
    inverse, scaling = _default(rope, dim)
    return inverse / rope["factor"], scaling


def _llama3(rope: Mapping[str, Any], dim: int) -> Frequencies:
    """Llama 3.1: slow pairs turn `factor` times slower, fast ones as before, blended between."""
    inverse, scaling = _default(rope, dim)
    factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    window = rope["original_max_position_embeddings"]
    turn = 2 * math.pi / inverse
    slowed = torch.where(turn > window / low, inverse / factor, inverse)
    blend = (window / turn - low) / (high - low)
    blended = (1 - blend) * slowed / factor + blend * slowed
    between = (turn >= window / high) & (turn <= window / low)
    return torch.where(between, blended, slowed), scaling


def _yarn(rope: Mapping[str, Any], dim: int) -> Frequencies:
    """YaRN (Peng et al., 2023): a linear ramp over dimensions from kept to interpolated."""
    factor = rope["factor"]
    kept = 1.0 / _wavelengths(rope, dim)
    interpolated = 1.0 / (factor * _wavelengths(rope, dim))
    low, high = _yarn_range(rope, dim)
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)
    keep = 1 - torch.clamp(ramp, 0, 1)
    return interpolated * (1 - keep) + kept * keep, _yarn_scaling(rope, factor)


def _yarn_range(rope: Mapping[str, Any], dim: int) -> tuple[float, float]:
    """The pairs between which the ramp runs: those that turn `beta_fast` and `beta_slow` times."""
    theta, window = rope["rope_theta"], rope["original_max_position_embeddings"]

    def pair(turns: float) -> float:
        return (dim * math.log(window / (turns * 2 * math.pi))) / (2 * math.log(theta))

    low, high = pair(rope.get("beta_fast") or 32), pair(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    return low, high + 0.001 if high == low else high


def _yarn_scaling(rope: Mapping[str, Any], factor: float) -> float:
    if "attention_factor" in rope:
        return float(rope["attention_factor"])

    def scale(slope: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * slope * math.log(factor) + 1.0

    mscale, mscale_all = rope.get("mscale"), rope.get("mscale_all_dim")
    return scale(mscale) / scale(mscale_all) if mscale and mscale_all else scale(1)


_SCHEMES: dict[str, Callable[[Mapping[str, Any], int], Frequencies]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
