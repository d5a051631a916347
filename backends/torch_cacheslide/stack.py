"""A transformers decoder taken apart into embed, layers and logits, so that rows may be few.

In: token ids or hidden states of the rows in flight. Out: hidden states, logits. The layers are
transformers' own; we only hand them the rows' positions, our cache and our attention layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from torch_cacheslide.cache import WorkingCache
from torch_cacheslide.layout import Layouts


class DecoderStack:
    """The layers of a Llama-like `ForCausalLM` model loaded with our attention implementation."""

    def __init__(self, model: Any) -> None:
        config = model.config
        self._embedding = model.model.embed_tokens
        self._norm = model.model.norm
        self._head = model.lm_head
        self._layers = list(model.model.layers)
        # renamed in transformers 5.20 or so; both spellings are in use
        names = signature(self._layers[0].forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"
        self._cache: WorkingCache | None = None
        self.layers = len(self._layers)
        self.kv_heads = int(config.num_key_value_heads)
        self.head_dim = int(
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        for index, layer in enumerate(self._layers):
            _key_source(layer.self_attn).register_forward_hook(partial(self._capture, index))

    @property
    def attentions(self) -> list[nn.Module]:
        """The attention module of every layer."""
        return [layer.self_attn for layer in self._layers]

    def embed(self, ids: Tensor) -> Tensor:
        """[rows] -> [1, rows, hidden]."""
        embedded: Tensor = self._embedding(ids[None])
        return embedded

    def layer(
        self,
        index: int,
        hidden: Tensor,
        cos_sin: tuple[Tensor, Tensor],
        cache: WorkingCache,
        layout: Layouts,
    ) -> Tensor:
        """Hidden [1, rows, hidden] through one layer; cos and sin are [1, rows, head_dim]."""
        self._cache = cache
        output = self._layers[index](
            hidden,
            attention_mask=None,
            position_embeddings=cos_sin,
            use_cache=True,
            layout=layout,
            **{self._cache_name: cache},
        )
        self._cache = None
        return output if isinstance(output, Tensor) else output[0]

    def forward(
        self,
        tokens: Sequence[int],
        cos_sin: tuple[Tensor, Tensor],
        cache: WorkingCache,
        layout: Layouts,
    ) -> Tensor:
        """`tokens` [t] through all layers, with cos and sin [t, head_dim]: logits [t, vocabulary]
        after each of them."""
        hidden = self.embed(torch.tensor(tokens, device=self.device))
        cos, sin = cos_sin
        for layer in range(self.layers):
            hidden = self.layer(layer, hidden, (cos[None], sin[None]), cache, layout)
        return self.logits(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """[1, rows, hidden] -> [rows, vocabulary] in float32 (float64 models keep float64)."""
        logits: Tensor = self._head(self._norm(hidden))[0]
        return logits if logits.dtype == torch.float64 else logits.float()

    def _capture(self, index: int, _: nn.Module, __: Any, keys: Tensor) -> None:
        if self._cache is not None:
            self._cache.capture(index, keys)


def _key_source(attention: nn.Module) -> nn.Module:
    """The module whose output is the key before rotation: the key norm where there is one."""
    norm = getattr(attention, "k_norm", None)
    module = norm if norm is not None else attention.k_proj
    assert isinstance(module, nn.Module)
    return module
