"""Contextual attention as a backend of vLLM's, over its plain paged cache.

In: queries, keys and values of a step, and the step's `Sequences`. Out: attention output. Keys lie
in the cache as they are projected, unrotated.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionType

from cacheslide_agents.errors import UnsupportedModelError
from cacheslide_agents.position.contextual import CanonicalMass
from vllm_cacheslide.cope.attending import attend
from vllm_cacheslide.cope.sequences import Sequence, Sequences, SequencesBuilder

_CACHES = ("auto", "float16", "bfloat16", "float32")


class CopeBackend(AttentionBackend):
    """Given to vLLM's `Attention` layers by name of its class; never chosen by a platform."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        """vLLM's word for backends that are not its own."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[CopeAttention]:
        return CopeAttention

    @staticmethod
    def get_builder_cls() -> type[SequencesBuilder]:
        return SequencesBuilder


class CopeAttention(AttentionImpl[Sequences]):
    """That of layer `index`, whose query heads are `heads` of the model's on this rank.

    `embedding`: the parameter [heads, npos, head_size] of these heads.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        *,
        embedding: Tensor,
        index: int,
        heads: slice,
    ) -> None:
        if kv_cache_dtype not in _CACHES:
            raise UnsupportedModelError(
                f"contextual positions are not supported with a KV cache of {kv_cache_dtype}"
            )
        if sliding_window is not None:
            raise UnsupportedModelError("contextual positions have no sliding window")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, scale
        self.kv_cache_dtype = kv_cache_dtype
        self._embedding, self._index, self._heads = embedding, index, heads

    def do_kv_cache_update(
        self, layer: object, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Keys and values [n, kv_heads, head_size] to their slots in `kv_cache`
        [blocks, kv_heads, block_size, 2 * head_size].

        Padding (slot -1) goes to vLLM's block 0, which belongs to no request.
        """
        count, size = len(slot_mapping), kv_cache.shape[2]
        slots = slot_mapping.clamp(min=0)
        both = torch.cat((key[:count], value[:count]), dim=-1)
        kv_cache[slots // size, :, slots % size] = both.to(kv_cache.dtype)

    def forward(
        self,
        layer: object,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Sequences | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Queries [n, heads, head_size] to `output`, as large. Without metadata, as vLLM measures
        memory, the output is 0."""
        if attn_metadata is None:
            return output.zero_()
        for sequence in attn_metadata.each:
            part = slice(sequence.start, sequence.stop)
            output[part] = attend(
                query[part].transpose(0, 1),
                kv_cache,
                sequence,
                self._embedding,
                scale=self.scale,
                masses=self._masses(sequence),
            ).transpose(0, 1)
        return output

    def _masses(self, sequence: Sequence) -> list[CanonicalMass]:
        if sequence.canonical is None:
            return []
        whole = sequence.canonical.of(self._index)
        return [replace(each, mass=each.mass[self._heads]) for each in whole]
