"""Contextual attention of one sequence over vLLM's pages: by the fused kernel, or by torch.

In: a sequence's queries, one layer's cache. Out: its attention output. The kernel reads the pages
where they lie, on CUDA, where it has proved right; else they are gathered.
"""

from __future__ import annotations

from collections.abc import Sequence as Several

import torch
from torch import Tensor

from cacheslide_agents.position.contextual import CanonicalMass, contextual_attention
from cacheslide_agents.position.kernels import fused_attention
from cacheslide_agents.position.kernels.trust import trusted_on_pages
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
    keys, values = cache.tensor_split(2, dim=-1)
    if trusted_on_pages(query, keys, positions=embedding.shape[1], massed=bool(masses)):
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
