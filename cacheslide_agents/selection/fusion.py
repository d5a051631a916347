"""How a recomputed token's new keys and values join the cached ones (paper, Algorithm 2).

In: new and cached K and V of the correction rows of one layer. Out: what is written to the cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
class Fusion(Protocol):
    """K and V are [kv_heads, rows, head_dim]; a weight is [rows].

    Fusing commutes with rotation, so keys may be rotated or position-free, as long as both are alike.
    """

    @property
    def needs_cached(self) -> bool: ...

    def weight(self, new_keys: Tensor, cached_keys: Tensor) -> Tensor | None:
        """The weight this layer's keys give to the NEXT layer (the paper fuses with the previous)."""
        ...

    def fuse(self, new: Tensor, cached: Tensor, weight: Tensor | None) -> Tensor: ...


@dataclass(frozen=True)
class Replace:
    """The new values win (weight 1). Our default: see docs/decisions.md."""

    needs_cached: bool = False

    def weight(self, new_keys: Tensor, cached_keys: Tensor) -> None:
        return None

    def fuse(self, new: Tensor, cached: Tensor, weight: Tensor | None) -> Tensor:
        return new
