"""Which engines can reuse across positions, said before the first request.

In: vLLM's config. Out: why this one cannot, in words; nothing when it can.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import vllm

from cacheslide_agents.errors import UnsupportedModelError
from cacheslide_agents.position.base import Position
from cacheslide_agents.position.contextual import Contextual
from cacheslide_agents.position.layers import restricted_layers
from cacheslide_agents.position.rotary import Rotary
from vllm_cacheslide.cope.config import MODEL_TYPE as COPE

if TYPE_CHECKING:
    from vllm.config import VllmConfig

TESTED_VERSIONS = ("0.32",)
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", COPE)


def why_not(config: VllmConfig) -> str:
    """Empty, or why requests of this engine are all prefilled by vLLM itself."""
    model, parallel, cache = config.model_config, config.parallel_config, config.cache_config
    reasons = {
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "context parallelism": parallel.decode_context_parallel_size > 1,
        "LoRA": config.lora_config is not None,
        "speculative decoding": config.speculative_config is not None,
        f"a KV cache of {cache.cache_dtype}": cache.cache_dtype.startswith(("fp8", "nvfp4", "int")),
        "multi-head latent attention": model.use_mla,
        "several model inputs (multimodal)": model.is_multimodal_model,
        # however wide it is: vLLM keeps blocks of another kind for such a layer
        "a sliding window": bool(restricted_layers(model.hf_text_config)),
    }
    met = [name for name, is_so in reasons.items() if is_so]
    if met:
        return "not supported with " + ", ".join(met)
    model_type = model.hf_text_config.model_type
    if model_type not in MODEL_TYPES:
        return f"model type {model_type!r} is not one of {', '.join(MODEL_TYPES)}"
    try:
        position_of(model.hf_text_config)
    except UnsupportedModelError as error:
        return str(error)
    return ""


def position_of(config: Any) -> Position:
    """What a transformers config says of positions. `UnsupportedModelError` if we cannot."""
    return Contextual() if config.model_type == COPE else Rotary.from_config(config)


def version_note() -> str:
    """Empty for a tested version of vLLM."""
    if vllm.__version__.startswith(TESTED_VERSIONS):
        return ""
    return f"vLLM {vllm.__version__} is not among the tested versions {TESTED_VERSIONS}"
