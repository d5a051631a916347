"""Which models this backend computes rightly; the others are refused by name before loading.

In: the config of a model, as a mapping and as transformers completes it. Out: nothing, or an
`UnsupportedModelError` that names the model, the feature and the mend.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cacheslide_agents.errors import ModelLoadError, UnsupportedModelError
from cacheslide_agents.position.layers import WINDOWED, restricted_layers
from cacheslide_agents.position.rotary import Rotary

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "mpt", "cope_llama")
_MPT_NEEDS: dict[str, Any] = {
    "attn_type": "multihead_attention",
    "alibi": True,
    "prefix_lm": False,
    "qk_ln": False,
}
"""What transformers computes whatever the config says, so that the config must say it."""


def check_model_type(config: Mapping[str, Any], folder: Path) -> None:
    """Refuses other families, and weights in a format that only their own kernels read."""
    model_type = config.get("model_type")
    if model_type not in MODEL_TYPES:
        raise UnsupportedModelError(
            f"{folder}: model_type {model_type!r} is not handled by the torch backend; it runs "
            f"{', '.join(MODEL_TYPES)}"
        )
    quantization = config.get("quantization_config")
    if quantization:
        known = isinstance(quantization, Mapping)
        method = quantization.get("quant_method", "unknown") if known else quantization
        raise UnsupportedModelError(
            f"{folder}: weights quantised with {method!r} are not handled by the torch backend; "
            "use the unquantised checkpoint, or dequantise it and save it again"
        )


def check_layers(config: Any, folder: Path) -> None:
    """Refuses layers that do not attend to the whole context, and rotary schemes not handled.

    Rotary parameters that are no numbers are a `ModelLoadError`.
    """
    if config.model_type == "mpt":
        _check_mpt(config, folder)
        return
    kinds, width = restricted_layers(config), getattr(config, "sliding_window", None)
    if width is not None and width >= config.max_position_embeddings:
        kinds -= {WINDOWED}
    if WINDOWED in kinds and width is not None:
        raise UnsupportedModelError(
            f"{folder}: sliding-window attention over {width} of {config.max_position_embeddings} "
            "positions is not handled by the torch backend; use a checkpoint with full attention"
        )
    if kinds:
        raise UnsupportedModelError(
            f"{folder}: layers of type {', '.join(sorted(kinds))} are not handled by the torch "
            "backend; use a checkpoint whose layers all have full attention"
        )
    _check_rotary(config, folder)


def _check_mpt(config: Any, folder: Path) -> None:
    found = {name: getattr(config.attn_config, name) for name in _MPT_NEEDS}
    found["logit_scale"] = config.logit_scale
    for name, needed in {**_MPT_NEEDS, "logit_scale": None}.items():
        if found[name] != needed:
            raise UnsupportedModelError(
                f"{folder}: an MPT model with {name}={found[name]!r} is not handled by the torch "
                f"backend; it runs those with {needed!r}"
            )


def _check_rotary(config: Any, folder: Path) -> None:
    """NaN angles must end here: some attention kernels turn them into plausible numbers."""
    try:
        finite = bool(Rotary.from_config(config).inv_freq.isfinite().all())
        trouble = None if finite else "they give frequencies that are not finite"
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        trouble = str(error)
    if trouble:
        raise ModelLoadError(
            f"{folder}: the rotary parameters of config.json cannot be used ({trouble}); fetch it "
            "again"
        )
