"""`fused_attention` in torch, for machines without a GPU.

In: what the kernel gets. Out: what it would give; and what was asked of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from cacheslide_agents.position.contextual import CanonicalMass, contextual_attention
from cacheslide_agents.position.kernels import Tiling


class StandIn:
    """`fused_attention` in torch; remembers rows, whether contextual, whether with slots."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, bool, bool]] = []

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rows: Tensor,
        *,
        scale: float,
        embedding: Tensor | None = None,
        slots: Tensor | None = None,
        masses: Sequence[CanonicalMass] = (),
        tiling: Tiling | None = None,
    ) -> Tensor:
        assert rows.dtype == torch.int32
        self.calls.append((query.shape[1], embedding is not None, slots is not None))
        if key.dim() == 4:
            key, value = (pages.transpose(0, 1).flatten(1, 2) for pages in (key, value))
        count = int(rows[-1]) + 1  # what lies behind was never written: any number, or none
        there = slice(count) if slots is None else slots[:count]
        key, value = key[:, there], value[:, there]
        if embedding is not None:
            return contextual_attention(
                query, key, value, embedding, rows, scale=scale, masses=masses
            )
        seen = torch.arange(key.shape[1]) <= rows[:, None]
        return scaled_dot_product_attention(
            query[None], key[None], value[None], attn_mask=seen, scale=scale, enable_gqa=True
        )[0]
