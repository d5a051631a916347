"""CCPE profiles of an engine: read and checked before it starts, asked by its scheduler.

In: a CoPE checkpoint's folder, files and folders of profiles. Out: `Profiles`.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from cacheslide_agents.policies.canonical import (
    CopeModel,
    ProfilePaths,
    Profiles,
    refuse_model,
)
from cacheslide_agents.weights.checkpoint import read_config
from cacheslide_agents.weights.fingerprint import fingerprint
from vllm_cacheslide.cope.config import MODEL_TYPE, CopeLlamaConfig


def open_profiles(model: str | Path, paths: ProfilePaths) -> Profiles:
    """Raises as `Profiles`; with no `paths`, nothing of `model` is read.

    `RequestError` if `model` is no CoPE model.
    """
    return Profiles(partial(_cope_model, Path(model)), paths)


def _cope_model(folder: Path) -> CopeModel:
    config = read_config(folder)
    if config.get("model_type") != MODEL_TYPE:
        refuse_model(folder.name)
    sizes = CopeLlamaConfig.from_dict(config)
    digest = fingerprint(folder, torch.float32)
    return CopeModel(digest, sizes.num_hidden_layers, sizes.num_attention_heads, sizes.cope_npos)
