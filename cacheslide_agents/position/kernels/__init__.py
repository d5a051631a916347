"""Fused attention of selected rows on CUDA, by Triton; the numbers of `contextual_attention`.

In: query rows, keys and values, the rows' places. Out: attention output, in O(rows) memory.
Importing this needs no triton; running a kernel does.
"""

from cacheslide_agents.position.kernels.launch import (
    Tiling,
    covers,
    fused_attention,
    has_triton,
)

__all__ = ["Tiling", "covers", "fused_attention", "has_triton"]
