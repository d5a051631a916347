"""Which correction tokens stop being corrected, every few layers (paper, Algorithm 2, CKSim).

In: new and cached keys of the correction rows at a gate layer. Out: the rows that leave.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
class Gate(Protocol):
    """Asked after every `every`-th layer (layers counted from 1). Vacancies go to the next ranked."""

    @property
    def every(self) -> int: ...

    def removes(self, new_keys: Tensor, cached_keys: Tensor) -> Tensor:
        """Bool [rows] from keys [kv_heads, rows, head_dim]."""
        ...
