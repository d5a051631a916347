"""What every position scheme answers for a key that stands somewhere new.

In: keys without positions, and positions. Out: keys as attention looks at them.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


class Position(Protocol):
    """`Rotary` turns keys by angles; `Alibi` leaves them as they are, and has none."""

    def cos_sin(
        self, positions: Tensor | npt.NDArray[np.int64], dtype: torch.dtype = ...
    ) -> tuple[Tensor, Tensor]:
        """cos and sin of the angles at `positions` [n], each [n, angles]."""

    def rotate(self, keys: Tensor, cos: Tensor, sin: Tensor, out: Tensor | None = None) -> Tensor:
        """Position-free `keys` [..., n, head_dim] brought to where `cos` and `sin` are from."""

    def unrotate(self, keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Undo `rotate`."""


class Unmoved:
    """Schemes under which keys stay as they are wherever they move."""

    def rotate(self, keys: Tensor, cos: Tensor, sin: Tensor, out: Tensor | None = None) -> Tensor:
        """`keys` as they are."""
        return keys.clone() if out is None else out.copy_(keys)

    def unrotate(self, keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`keys` as they are, in the dtype of `cos`."""
        return keys.to(cos.dtype)
