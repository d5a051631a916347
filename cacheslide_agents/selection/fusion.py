"""How a recomputed token's new keys and values join the cached ones (paper, Algorithm 2).

In: new and cached K and V of the correction rows of one layer. Out: what is written to the cache.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor


@runtime_checkable
class Fusion(Protocol):
    """K and V are [kv_heads, rows, head_dim]; a weight is [rows].

    Fusing commutes with rotation, so keys may be rotated or position-free, if both are alike.
    """

    @property
    def needs_cached(self) -> bool: ...

    def weight(self, new_keys: Tensor, cached_keys: Tensor) -> Tensor | None:
        """The weight this layer's keys give to the NEXT layer (the paper fuses with the last)."""
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


@dataclass(frozen=True)
class PaperFusion:
    """The literal rule: K <- a K_new + (1 - a) K_cached, and V with the same a.

    a = |K_new - K_cached|^2 / |K_cached|^2 per token over all heads, unclamped (above 1 it
    extrapolates). A layer fuses with the a of the layer before and hands its own on; without one,
    at the first corrected layer, the new values win. `eps` is only there against division by zero,
    should a cached key be zero. Measured: a is small where it matters, so this undoes most of the
    correction.
    """

    eps: float = 1e-12
    needs_cached: bool = field(default=True, init=False)

    def weight(self, new_keys: Tensor, cached_keys: Tensor) -> Tensor:
        """[rows], float32 (float64 for float64 keys)."""
        wide = torch.promote_types(cached_keys.dtype, torch.float32)
        cached = cached_keys.to(wide)
        deviation = (new_keys.to(wide) - cached).square().sum(dim=(0, 2))
        return deviation / cached.square().sum(dim=(0, 2)).clamp_min(self.eps)

    def fuse(self, new: Tensor, cached: Tensor, weight: Tensor | None) -> Tensor:
        if weight is None:
            return new
        share = weight[:, None]
        return (share * new + (1 - share) * cached).to(new.dtype)
