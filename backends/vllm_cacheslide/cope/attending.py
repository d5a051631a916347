"""Contextual attention of one sequence over vLLM's pages: by the fused kernel, or by torch.

In: a sequence's queries, one layer's cache. Out: its attention output. The kernel reads the pages
where they lie, on CUDA, where it has proved right; else they are gathered.
"""

from __future__ import annotations

from collections.abc import Sequence as Several

import torch
from torch import Tensor

from cacheslide_agents.position.contextual import CanonicalMass, contextual_attention
from cacheslide_agents.position.kernels import fused_attention, has_triton
from cacheslide_agents.position.kernels.trust import Kind, trusted
from vllm_cacheslide.cope.sequences import Sequence


def attend(
    query: Tensor,
    cache: Tensor,
    sequence: Sequence,
    embedding: Tensor,
    *,
    scale: float,
    masses: Several[CanonicalMass] = (),
) -> Tensor:
    """Queries [heads, n, head_size] over `cache` [blocks, kv_heads, block_size, 2 * head_size].

    Returns [heads, n, head_size].
    """
    if _has_kernel(query, cache, embedding, masses):
        keys, values = cache.tensor_split(2, dim=-1)
        return fused_attention(
            query,
            keys,
            values,
            sequence.rows.int(),
            scale=scale,
            embedding=embedding,
            slots=slots_of(sequence, cache.shape[2]),
            masses=masses,
        )
    gathered = cache.transpose(0, 1)[:, sequence.blocks].flatten(1, 2)[:, : sequence.length]
    keys, values = gathered.tensor_split(2, dim=-1)
    return contextual_attention(
        query, keys, values, embedding, sequence.rows, scale=scale, masses=masses
    )


def slots_of(sequence: Sequence, block_size: int) -> Tensor:
    """int64 [length]: where in the cache each token lies."""
    within = torch.arange(block_size, device=sequence.blocks.device)
    return (sequence.blocks[:, None] * block_size + within).flatten()[: sequence.length]


def _has_kernel(
    query: Tensor, cache: Tensor, embedding: Tensor, masses: Several[CanonicalMass]
) -> bool:
    if not (query.is_cuda and has_triton() and cache.dtype == query.dtype):
        return False
    kind = Kind.of(
        query,
        cache.shape[1],
        positions=embedding.shape[1],
        slotted=True,
        massed=bool(masses),
        page_size=cache.shape[2],
    )
    return kind.covered and trusted(kind)
