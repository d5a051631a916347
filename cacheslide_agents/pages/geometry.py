"""The shape that keys and values of one model have.

In: the layers of a context. Out: sizes of pages and blocks, in rows and bytes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Self

import torch

from cacheslide_agents.errors import PageError
from cacheslide_agents.pages.base import PAGE_TOKENS, LayerKV

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
}


@dataclass(frozen=True, slots=True)
class Geometry:
    """A page is [2, kv_heads, PAGE_TOKENS, head_dim], a block [layers] of them."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str

    @classmethod
    def of(cls, layers: Sequence[LayerKV], tokens: int) -> Self:
        """`PageError` unless every layer is [kv_heads, tokens, head_dim], all of one kind."""
        first = layers[0][0]
        kind = (first.shape, first.dtype)
        what = f"a context of {tokens} tokens is stored as [kv_heads, {tokens}, head_dim]"
        for layer, (keys, values) in enumerate(layers):
            for name, tensor in (("keys", keys), ("values", values)):
                if tensor.dim() != 3 or tensor.shape[1] != tokens:
                    raise PageError(f"{name} of layer {layer} are {list(tensor.shape)}; {what}")
                if (tensor.shape, tensor.dtype) != kind:
                    raise PageError(
                        f"{name} of layer {layer} are {list(tensor.shape)} {tensor.dtype}, those "
                        f"of layer 0 {list(first.shape)} {first.dtype}; all layers must be alike"
                    )
        dtype = str(first.dtype).removeprefix("torch.")
        if dtype not in DTYPES:
            raise PageError(f"keys of {dtype} cannot be stored; known: {', '.join(DTYPES)}")
        return cls(len(layers), first.shape[0], first.shape[2], dtype)

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def page_rows(self) -> int:
        """Vectors of head_dim numbers in a page."""
        return 2 * self.kv_heads * PAGE_TOKENS

    @property
    def page_bytes(self) -> int:
        return self.page_rows * self.head_dim * self.torch_dtype.itemsize

    @property
    def block_bytes(self) -> int:
        return self.layers * self.page_bytes

    @property
    def token_bytes(self) -> int:
        """Keys and values of one token in all layers."""
        return self.block_bytes // PAGE_TOKENS

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """`ValueError` when `text` is none of ours."""
        try:
            made = cls(**json.loads(text))
        except TypeError as error:
            raise ValueError(str(error)) from error
        sizes = (made.layers, made.kv_heads, made.head_dim)
        if made.dtype not in DTYPES or not all(isinstance(s, int) and s > 0 for s in sizes):
            raise ValueError(f"no geometry: {text}")
        return made
