"""A vLLM decoder taken apart into embedding and layers, so that rows may be few.

In: the model as vLLM loaded it. Out: hidden states of some rows, layer by layer. The layers are
vLLM's own, quantised or split over ranks as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.attention import Attention

from cacheslide_agents.errors import UnsupportedModelError
from cacheslide_agents.position.rotary import Rotary

_PROBED = (0, 1, 7, 100)
"""Positions at which vLLM's angles are compared with ours."""


class Decoder:
    """Llama-like: `layer(positions, hidden, residual)`, one `Attention` in each layer."""

    def __init__(self, model: Any) -> None:
        self._model = model.model
        self._layers: list[Any] = list(self._model.layers)
        self.attentions = [_only_attention(layer) for layer in self._layers]
        first = self.attentions[0]
        self.kv_heads = int(first.num_kv_heads)
        self.head_dim = int(first.head_size)
        parameter = next(self._model.parameters())
        self.device = parameter.device

    @property
    def layers(self) -> int:
        return len(self._layers)

    def embed(self, ids: Tensor) -> Tensor:
        """[rows] -> [rows, hidden]."""
        hidden: Tensor = self._model.embed_input_ids(ids)
        return hidden

    def layer(
        self, index: int, positions: Tensor, hidden: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Hidden states and residual [rows, hidden] through one layer, in a forward context."""
        hidden, residual = self._layers[index](positions, hidden, residual)
        assert residual is not None
        return hidden, residual

    def check_rotary(self, ours: Rotary) -> None:
        """`UnsupportedModelError` unless vLLM turns keys by the angles that we do."""
        rotary = self._layers[0].self_attn.rotary_emb
        if not getattr(rotary, "is_neox_style", False):
            raise UnsupportedModelError("rotary positions in vLLM are interleaved")
        if rotary.rotary_dim != self.head_dim:
            raise UnsupportedModelError("rotary positions cover only a part of the head")
        probed = torch.tensor(_PROBED)
        theirs = rotary.cos_sin_cache.cpu()[probed].float()
        cos, sin = ours.cos_sin(probed)
        half = self.head_dim // 2
        expected = torch.cat((cos[:, :half], sin[:, :half]), dim=-1)
        if not torch.allclose(theirs, expected, atol=1e-2):
            raise UnsupportedModelError("vLLM's rotary angles are not those of the model's config")


def _only_attention(layer: nn.Module) -> Attention:
    found = [module for module in layer.modules() if isinstance(module, Attention)]
    if len(found) != 1:
        raise UnsupportedModelError(
            f"{type(layer).__name__} has {len(found)} attention layers where one is expected"
        )
    return found[0]
