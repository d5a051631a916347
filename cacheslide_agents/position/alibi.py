"""Linear biases (ALiBi): keys carry no position, attention is biased by how far back a key stands.

In: positions of query rows and of keys. Out: what is added to their scaled dot products. A run that
moves keeps its keys and values as they are; only the bias, at the current positions, changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, log2
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cacheslide_agents.position.base import Unmoved
from cacheslide_agents.position.rotary import HasToDict


@dataclass(frozen=True, eq=False)
class Alibi(Unmoved):
    """ALiBi (Press et al., 2022) with the slopes of MPT.

    `slopes` is float32 [heads]: 2 ** (-bias_max * i / heads) for i = 1 ... heads. For a number of
    heads that is no power of two, those of the next power of two, every second one first.
    """

    slopes: Tensor

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | HasToDict) -> Alibi:
        """From the config of an MPT model or its dict."""
        fields = config if isinstance(config, Mapping) else config.to_dict()
        return cls(mpt_slopes(int(fields["n_heads"]), fields["attn_config"]["alibi_bias_max"]))

    def bias(self, rows: Tensor, keys: Tensor) -> Tensor:
        """float32 [heads, rows, keys] from integer positions [rows] and [keys]."""
        distance = (keys[None, :] - rows[:, None]).to(torch.float32)
        return self.slopes.to(distance.device)[:, None, None] * distance

    def cos_sin(
        self, positions: Tensor | npt.NDArray[np.int64], dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, Tensor]:
        """No angles, [n, 0]: nothing is turned."""
        none = torch.as_tensor(positions)[..., None][..., :0].to(dtype)
        return none, none


def mpt_slopes(heads: int, bias_max: float = 8.0) -> Tensor:
    """float32 [heads], as `Alibi` says."""
    whole = 2 ** ceil(log2(heads))
    slopes = torch.tensor([2.0 ** (-bias_max * step / whole) for step in range(1, whole + 1)])
    if whole != heads:
        slopes = torch.cat([slopes[1::2], slopes[::2]])[:heads]
    return slopes
