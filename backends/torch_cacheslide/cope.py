"""Llama with contextual positions (CoPE) in place of rotary ones, as a transformers architecture.

In: a checkpoint of model type `cope_llama`, or a Llama model to start from. Out: a model whose keys
carry no position. Each attention layer has one more parameter, `cope_embedding`.
"""

from __future__ import annotations

from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.masking_utils import sdpa_mask

from cacheslide_agents.errors import UnsupportedModelError
from cacheslide_agents.position.contextual import contextual_attention
from torch_cacheslide.attention import ATTENTION_NAME, FUSED_ATTENTION_NAME

COPE_ATTENTION = "cope"
_ATTENTIONS = (COPE_ATTENTION, ATTENTION_NAME, FUSED_ATTENTION_NAME)


@strict
class CopeLlamaConfig(LlamaConfig):
    """`cope_npos`: positions per head, 0 to cope_npos - 1; what lies further back is at the last.

    The rotary parameters of the base model are kept, and not used.
    """

    model_type = "cope_llama"

    cope_npos: int = 64


class CopeLlamaForCausalLM(LlamaForCausalLM):
    """Runs with its own attention implementation ("cope"), or with the torch backend's.

    One unpadded sequence at a time: a padding mask raises `UnsupportedModelError`.
    """

    config_class = CopeLlamaConfig

    def __init__(self, config: CopeLlamaConfig) -> None:
        if config._attn_implementation not in _ATTENTIONS:
            config._attn_implementation = COPE_ATTENTION
        super().__init__(config)
        self.model.rotary_emb = _Unrotated()
        for layer in self.model.layers:
            attention = layer.self_attn
            shape = (config.num_attention_heads, config.cope_npos, attention.head_dim)
            attention.cope_embedding = nn.Parameter(torch.zeros(shape))


class _Unrotated(nn.Module):
    """The rotation by no angle: what the layers apply in place of their rotary embedding."""

    def forward(self, hidden: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        one = hidden.new_ones(1, 1, 1)
        return one, torch.zeros_like(one)


def attend_contextually(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    **_: Any,
) -> tuple[Tensor, None]:
    """The last rows of [batch, heads, n, head_dim] over all keys; transformers' interface."""
    count, total = query.shape[2], key.shape[2]
    if attention_mask is not None and not _is_causal(attention_mask, total):
        raise UnsupportedModelError(
            "CoPE counts every key, padding too: run unpadded sequences, one at a time"
        )
    rows = torch.arange(total - count, total, device=query.device)
    embedding = module.cope_embedding
    assert isinstance(embedding, Tensor)
    outputs = [
        contextual_attention(*sequence, embedding, rows, scale=scaling)
        for sequence in zip(query, key, value, strict=True)
    ]
    return torch.stack(outputs).transpose(1, 2), None


def _is_causal(mask: Tensor, keys: int) -> bool:
    """Whether `mask` [batch, 1, rows, keys], boolean or additive, hides only what comes later."""
    seen = mask if mask.dtype == torch.bool else mask == 0
    rows = seen.shape[-2]
    causal = torch.ones(rows, keys, dtype=torch.bool, device=mask.device).tril(keys - rows)
    return bool((seen[..., :keys] == causal).all())


def register_cope() -> None:
    """Make `cope_llama` known to transformers' Auto classes; safe to call again."""
    AttentionInterface.register(COPE_ATTENTION, attend_contextually)
    AttentionMaskInterface.register(COPE_ATTENTION, sdpa_mask)
    AutoConfig.register(CopeLlamaConfig.model_type, CopeLlamaConfig, exist_ok=True)
    AutoModelForCausalLM.register(CopeLlamaConfig, CopeLlamaForCausalLM, exist_ok=True)


def cope_from_llama(base: LlamaForCausalLM, npos: int) -> CopeLlamaForCausalLM:
    """A CoPE model with the weights of `base`, positions not yet learnt (all embeddings zero).

    Everything but the attention projections is shared with `base`, which must not be trained then.
    Raises `UnsupportedModelError` for another family.
    """
    if base.config.model_type != "llama":
        raise UnsupportedModelError(
            f"conversion to CoPE starts from a Llama model; this one is {base.config.model_type!r}"
        )
    register_cope()
    fields = {k: v for k, v in base.config.to_dict().items() if k not in _NOT_CARRIED}
    with torch.device("meta"):
        model = CopeLlamaForCausalLM(CopeLlamaConfig(**fields, cope_npos=npos))
    model.model.rotary_emb = _Unrotated()
    weights = dict(base.state_dict())
    for name, weight in weights.items():
        if ".self_attn." in name:
            weights[name] = weight.clone()
    for name, parameter in model.named_parameters():
        if name.endswith("cope_embedding"):
            weights[name] = torch.zeros(parameter.shape, dtype=base.dtype, device=base.device)
    model.load_state_dict(weights, assign=True, strict=True)
    model.tie_weights()
    model.generation_config = base.generation_config
    return model


_NOT_CARRIED = frozenset({"model_type", "architectures", "transformers_version"})
