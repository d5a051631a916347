"""What a CCPE profile must fit: a CoPE model as this backend has loaded it.

In: a loaded model. Out: its digest and sizes.
"""

from __future__ import annotations

import torch

from cacheslide_agents.policies.canonical import CopeModel, refuse_model
from cacheslide_agents.weights.fingerprint import fingerprint
from torch_cacheslide.models import LoadedModel


def cope_model(loaded: LoadedModel) -> CopeModel:
    """`RequestError` for a model whose positions are not contextual."""
    config = loaded.model.config
    if config.model_type != "cope_llama":
        refuse_model(loaded.model_id)
    digest = fingerprint(loaded.path, torch.float32)
    layers, heads = config.num_hidden_layers, config.num_attention_heads
    return CopeModel(digest, int(layers), int(heads), int(config.cope_npos))
