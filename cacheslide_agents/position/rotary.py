"""Rotary positions: brings position-free keys to where they stand now, and back.

In: keys [..., tokens, head_dim] and integer positions [tokens]. Out: keys turned by the model's own
angles, bit for bit what transformers' rotary modules and `apply_rotary_pos_emb` give.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cacheslide_agents.position.frequencies import frequencies_of


class HasToDict(Protocol):
    """A transformers config."""

    def to_dict(self) -> dict[str, Any]: ...


@dataclass(frozen=True, eq=False)
class Rotary:
    """RoPE (Su et al., 2021) in the half-split convention: dimension i turns with i + head_dim / 2.

    `inv_freq` is float32 [head_dim / 2], radians per token; `attention_scaling` multiplies cos and
    sin (YaRN; 1 elsewhere). Angles add up, so a run that moves keeps its position-free keys and
    is only turned anew: for this position scheme that is all the paper's CCPE has to do.
    """

    inv_freq: Tensor
    attention_scaling: float = 1.0

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | HasToDict) -> Rotary:
        """From a transformers config or its dict; of a multimodal model, pass the text config.

        Raises `UnsupportedModelError` that names what this class does not handle.
        """
        fields = config if isinstance(config, Mapping) else config.to_dict()
        return cls(*frequencies_of(fields))

    @property
    def head_dim(self) -> int:
        return 2 * len(self.inv_freq)

    def cos_sin(
        self, positions: Tensor | npt.NDArray[np.int64], dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, Tensor]:
        """cos and sin of the angles at `positions` [n], each [n, head_dim], on their device.

        Angles are float32 whatever `dtype` is, as in transformers; only with float64 (a reference)
        they are float64 products of the model's float32 frequencies.
        """
        places = torch.as_tensor(positions)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        angles = places[..., None].to(wide) * self.inv_freq.to(places.device, wide)
        cos = (angles.cos() * self.attention_scaling).to(dtype)
        sin = (angles.sin() * self.attention_scaling).to(dtype)
        return torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)

    def rotate(self, keys: Tensor, cos: Tensor, sin: Tensor, out: Tensor | None = None) -> Tensor:
        """Position-free `keys` [..., n, head_dim] turned by `cos`, `sin` [n, head_dim].

        All of one dtype. `out` (which may be `keys` itself) takes the result, else a new tensor
        does; besides, only half of the keys' size is used for a moment.
        """
        turned = torch.empty_like(keys) if out is None else out
        source = keys.clone() if turned.data_ptr() == keys.data_ptr() else keys
        half = keys.shape[-1] // 2
        torch.mul(source, cos, out=turned)
        # Separate multiply and add: a fused addcmul rounds once and would differ in the last bit.
        turned[..., :half].sub_(source[..., half:] * sin[..., :half])
        turned[..., half:].add_(source[..., :half] * sin[..., half:])
        return turned

    def unrotate(self, keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Undo `rotate`: position-free keys [..., n, head_dim] in the dtype of `cos`.

        Pass float32 (or float64) `cos` and `sin`: keys of a narrower dtype are widened first, and
        the caller decides where to round. The attention scaling is divided out.
        """
        free = self.rotate(keys.to(cos.dtype), cos, -sin)
        return free.div_(self.attention_scaling**2)
