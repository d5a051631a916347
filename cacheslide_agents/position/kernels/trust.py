"""Which fused kernels may be used on a device: those that agree with torch there.

In: what a kernel is compiled for. Out: whether it runs and is right, tried once in a process.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache
from typing import Self

import torch
from torch import Tensor

from cacheslide_agents.position.contextual import CanonicalMass, contextual_attention
from cacheslide_agents.position.kernels.launch import Tiling, covers, fused_attention, has_triton

PROBE_KEYS = 300
TOLERANCE = {torch.float16: 1e-2, torch.bfloat16: 5e-2, torch.float32: 1e-3}
"""Largest difference from float64 that a trusted kernel has on numbers of size 1."""
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Kind:
    """What a kernel is compiled for; `positions` 0: none that are contextual; `page_size` 0: keys
    and values lie in one piece."""

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    groups: int
    positions: int
    tiling: Tiling
    slotted: bool = False
    massed: bool = False
    page_size: int = 0

    @classmethod
    def of(
        cls,
        query: Tensor,
        kv_heads: int,
        *,
        positions: int = 0,
        slotted: bool = False,
        massed: bool = False,
        page_size: int = 0,
    ) -> Self:
        """For queries [heads, rows, head_dim]."""
        heads, rows, head_dim = query.shape
        tiling = Tiling.of(rows, head_dim, query.dtype, contextual=positions > 0)
        at = (query.device, query.dtype, head_dim)
        return cls(*at, heads // kv_heads, positions, tiling, slotted, massed, page_size)

    @property
    def covered(self) -> bool:
        """Whether there is such a kernel."""
        return covers(self.dtype, self.head_dim, self.positions)


@cache
def trusted(kind: Kind) -> bool:
    """Whether this kernel runs here and agrees with torch; tried once, a warning says if not."""
    try:
        error = _probe(kind)
    except Exception:  # triton missing or too old, a tile too large for the device, ...
        log.warning("no fused kernel for %s: torch instead", kind, exc_info=True)
        return False
    if error > TOLERANCE[kind.dtype]:
        log.warning("fused kernel is %g off for %s: torch instead", error, kind)
        return False
    return True


def trusted_on_pages(
    query: Tensor, key: Tensor, *, positions: int = 0, massed: bool = False
) -> bool:
    """Whether there is a trusted kernel for queries [heads, rows, head_dim] over pages of keys
    [pages, kv_heads, page_size, head_dim], whose tokens lie in any slots."""
    if not (query.is_cuda and has_triton() and key.dtype == query.dtype):
        return False
    _, kv_heads, page_size, _ = key.shape
    kind = Kind.of(
        query, kv_heads, positions=positions, slotted=True, massed=massed, page_size=page_size
    )
    return kind.covered and trusted(kind)


def _probe(kind: Kind) -> float:
    """The largest difference from float64 for the last rows of a random prompt; NaN counts most."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(kind.device, kind.dtype)

    groups, head_dim, first = kind.groups, kind.head_dim, PROBE_KEYS - kind.tiling.rows
    rows = torch.arange(first, PROBE_KEYS, dtype=torch.int32, device=kind.device)
    query, key = normal(groups, len(rows), head_dim), normal(1, PROBE_KEYS, head_dim)
    value, scale = normal(1, PROBE_KEYS, head_dim), head_dim**-0.5
    embedding = normal(groups, kind.positions, head_dim) * 0.1 if kind.positions else None
    five = torch.full((groups,), 5.0, device=kind.device)
    masses = [CanonicalMass(first - 40, first, first, PROBE_KEYS, five)] if kind.massed else []
    order = torch.randperm(PROBE_KEYS, generator=generator).to(kind.device)
    slots = order if kind.slotted else None
    found = fused_attention(
        query,
        _paged(key, kind.page_size),
        _paged(value, kind.page_size),
        rows,
        scale=scale,
        embedding=embedding,
        slots=slots,
        masses=masses,
        tiling=kind.tiling,
    )
    if slots is not None:
        key, value = key[:, slots], value[:, slots]
    # Without contextual positions every key stands at the same one, which softmax does not see.
    table = query.new_zeros(groups, 1, head_dim) if embedding is None else embedding
    query, key, value, table = (each.double() for each in (query, key, value, table))
    wanted = contextual_attention(query, key, value, table, rows, scale=scale, masses=masses)
    return float((found.double() - wanted).abs().max().nan_to_num(nan=torch.inf))


def _paged(tensor: Tensor, size: int) -> Tensor:
    """[heads, n, head_dim] as pages [pages, heads, `size`, head_dim], if there is a size."""
    if not size:
        return tensor
    heads, count, dim = tensor.shape
    whole = tensor.new_zeros(heads, -(-count // size) * size, dim)
    whole[:, :count] = tensor
    return whole.view(heads, -1, size, dim).transpose(0, 1)
