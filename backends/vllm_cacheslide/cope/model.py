"""Llama with contextual positions in place of rotary ones, as an architecture of vLLM's.

In: vLLM's config of a `cope_llama` checkpoint, its weights. Out: vLLM's Llama, whose attention
layers rotate nothing and own one more parameter, `cope_embedding`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import QKVParallelLinear, RowParallelLinear
from vllm.model_executor.model_loader.weight_utils import sharded_weight_loader
from vllm.model_executor.models.llama import LlamaDecoderLayer, LlamaForCausalLM
from vllm.model_executor.models.utils import extract_layer_index
from vllm.model_executor.utils import set_weight_attrs

from cacheslide_agents.errors import UnsupportedModelError
from vllm_cacheslide.cope.attention import CopeBackend

if TYPE_CHECKING:
    from vllm.config import CacheConfig, VllmConfig
    from vllm.model_executor.layers.quantization import QuantizationConfig

    from vllm_cacheslide.cope.config import CopeLlamaConfig


class CopeLlamaAttention(nn.Module):
    """Projections split over ranks by heads, as the position embeddings are.

    Takes what vLLM's decoder layer gives its attention, of which some is about rotary positions.
    """

    def __init__(
        self,
        config: CopeLlamaConfig,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        *,
        quant_config: QuantizationConfig | None,
        bias: bool,
        bias_o_proj: bool,
        cache_config: CacheConfig | None,
        prefix: str,
        **_: Any,
    ) -> None:
        super().__init__()
        head_size = config.head_dim or hidden_size // num_heads
        self.qkv_proj = QKVParallelLinear(
            hidden_size,
            head_size,
            num_heads,
            num_kv_heads,
            bias=bias,
            quant_config=quant_config,
            prefix=f"{prefix}.qkv_proj",
        )
        self.o_proj = RowParallelLinear(
            num_heads * head_size,
            hidden_size,
            bias=bias_o_proj,
            quant_config=quant_config,
            prefix=f"{prefix}.o_proj",
        )
        heads = num_heads // get_tensor_model_parallel_world_size()
        first = heads * get_tensor_model_parallel_rank()
        self.cope_embedding = _table(heads, config.cope_npos, head_size)
        self.attn = Attention(
            heads,
            head_size,
            head_size**-0.5,
            num_kv_heads=self.qkv_proj.num_kv_heads,
            cache_config=cache_config,
            quant_config=quant_config,
            prefix=f"{prefix}.attn",
            attn_backend=CopeBackend,
            embedding=self.cope_embedding,
            index=extract_layer_index(prefix),
            heads=slice(first, first + heads),
        )
        kv_size = self.attn.num_kv_heads * head_size
        self._sizes = [heads * head_size, kv_size, kv_size]

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        """Hidden states [n, hidden] in and out; where they stand is counted, not told."""
        projected, _ = self.qkv_proj(hidden_states)
        attended = self.attn(*projected.split(self._sizes, dim=-1))
        output: Tensor
        output, _ = self.o_proj(attended)
        return output


def _table(heads: int, npos: int, head_size: int) -> nn.Parameter:
    """Position embeddings of this rank's heads; the checkpoint holds those of all."""
    table = nn.Parameter(torch.empty(heads, npos, head_size), requires_grad=False)
    set_weight_attrs(table, {"weight_loader": sharded_weight_loader(0)})
    return table


class CopeLlamaDecoderLayer(LlamaDecoderLayer):
    def __init__(self, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config, prefix, attn_layer_type=CopeLlamaAttention)


class CopeLlamaForCausalLM(LlamaForCausalLM):
    """`UnsupportedModelError` for engines that decode speculatively."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        if vllm_config.speculative_config is not None:
            raise UnsupportedModelError(
                "models with contextual positions are not supported with speculative decoding"
            )
        super().__init__(vllm_config=vllm_config, prefix=prefix, layer_type=CopeLlamaDecoderLayer)
