"""Which correction tokens stop being corrected, every few layers (paper, Algorithm 2, CKSim).

In: new and cached keys of the correction rows at a gate layer. Out: the rows that leave.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from cacheslide_agents.errors import RequestError


@runtime_checkable
class Gate(Protocol):
    """Asked after every `every`-th layer (counted from 1). Vacancies go to the next ranked."""

    @property
    def every(self) -> int: ...

    def removes(self, new_keys: Tensor, cached_keys: Tensor) -> Tensor:
        """Bool [rows] from keys [kv_heads, rows, head_dim]."""
        ...


@dataclass(frozen=True)
class CkSimGate:
    """CacheSlide, Algorithm 2: CKSim = mean over heads of cosine(K_new, K_cached) decides.

    `reading="literal"` is the printed rule: a token leaves when CKSim < tau, that is when its key
    is still far from the cached one. `reading="converged"` is what the prose says: it leaves when
    1 - CKSim < tau, that is when correcting it no longer changes much.
    """

    reading: Literal["literal", "converged"] = "literal"
    tau: float = 0.12
    every: int = 4

    def __post_init__(self) -> None:
        if self.reading not in ("literal", "converged"):
            raise RequestError(
                f"CkSimGate(reading={self.reading!r}) must be 'literal' or 'converged'"
            )
        if not math.isfinite(self.tau):
            raise RequestError(f"CkSimGate(tau={self.tau!r}) must be a finite number")
        if self.every < 1:
            raise RequestError(f"CkSimGate(every={self.every!r}) must be at least 1 layer")

    def removes(self, new_keys: Tensor, cached_keys: Tensor) -> Tensor:
        wide = torch.promote_types(cached_keys.dtype, torch.float32)
        similarity = cosine_similarity(new_keys.to(wide), cached_keys.to(wide), dim=-1).mean(dim=0)
        distance = similarity if self.reading == "literal" else 1 - similarity
        return distance < self.tau
