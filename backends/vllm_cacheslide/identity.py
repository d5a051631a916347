"""What tells the keys and values of two engines apart.

In: vLLM's config. Out: a 128-bit hex digest, alike in the scheduler's process and in every worker.
Where contexts outlive the engine, weights are read for it: a few megabytes, when they are there.
"""

from __future__ import annotations

import json
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from huggingface_hub import snapshot_download

from cacheslide_agents.errors import ModelError, StoreError
from cacheslide_agents.weights.fingerprint import fingerprint as weights_fingerprint

if TYPE_CHECKING:
    from vllm.config import VllmConfig

FORMATS = ("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "runai_streamer")
"""Ways to load weights, in vLLM's words, that read safetensors where there are any."""


def fingerprint(config: VllmConfig) -> str:
    """Digest of the model's name, revision and config, of dtype and tensor-parallel size.

    With `store_path` also of its weights: `StoreError` where they cannot be read, as contexts of
    other weights would be taken for its own.
    """
    model = config.model_config
    parts = [
        str(model.model),
        str(model.revision),
        str(model.dtype),
        str(model.quantization),
        str(config.parallel_config.tensor_parallel_size),
        json.dumps(model.hf_config.to_dict(), sort_keys=True, default=str),
    ]
    if config.kv_transfer_config.kv_connector_extra_config.get("store_path") is not None:
        load_format = str(config.load_config.load_format)
        parts.append(digest_of_weights(_folder(config), model.dtype, load_format))
    return blake2b("|".join(parts).encode(), digest_size=16).hexdigest()


def digest_of_weights(folder: Path, dtype: torch.dtype, load_format: str = "auto") -> str:
    """`StoreError` where `folder` has no safetensors, or others are loaded in their place."""
    if load_format not in FORMATS:
        raise StoreError(_refusal(f"load_format={load_format!r} reads no safetensors of a folder"))
    try:
        return weights_fingerprint(folder, dtype)
    except (ModelError, OSError) as error:
        raise StoreError(_refusal(str(error))) from error


def _folder(config: VllmConfig) -> Path:
    """Where the weights lie by now, of a hub id too."""
    model = config.model_config
    if Path(model.model).is_dir():
        return Path(model.model)
    try:
        found = snapshot_download(
            model.model,
            revision=model.revision,
            cache_dir=config.load_config.download_dir,
            local_files_only=True,
        )
    except (OSError, ValueError) as error:
        raise StoreError(_refusal(f"{model.model} is no folder here ({error})")) from error
    return Path(found)


def _refusal(why: str) -> str:
    return f"store_path needs weights that tell this model from others: {why}; leave store_path out"
