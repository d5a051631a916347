"""The config of CoPE checkpoints, known to transformers by its model type.

In: a `config.json` of model type `cope_llama`. Out: a Llama config that says how many positions a
head has.
"""

from __future__ import annotations

from huggingface_hub.dataclasses import strict
from transformers import CONFIG_MAPPING, AutoConfig, LlamaConfig

MODEL_TYPE = "cope_llama"


@strict
class CopeLlamaConfig(LlamaConfig):
    """`cope_npos`: positions per head. Rotary parameters may be there, and are not used."""

    model_type = MODEL_TYPE

    cope_npos: int = 64


def register_config() -> None:
    """Safe to call again; a class that another backend has registered stays."""
    if MODEL_TYPE not in CONFIG_MAPPING:
        AutoConfig.register(MODEL_TYPE, CopeLlamaConfig)
