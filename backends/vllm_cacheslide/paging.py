"""vLLM's paged KV cache, one token slot at a time: where it is, how to write and how to read it.

In: block ids and prompt positions, or keys and values. Out: slots, or keys and values
[tokens, kv_heads, head_dim]. Writing goes through the attention backend and knows no layout;
reading knows two, and `check` proves at start which one, if any, this engine has.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from vllm.model_executor.layers.attention import Attention

from cacheslide_agents.errors import UnsupportedModelError


class PagedCache:
    """All layers of one rank. `block_size` is the scheduler's, in tokens."""

    def __init__(self, attentions: Sequence[Attention], block_size: int) -> None:
        self._attentions = attentions
        self.block_size = block_size
        self.device = attentions[0].kv_cache.device
        self.kernel_block_size = int(attentions[0].kv_cache.shape[-2])
        """Tokens of the blocks that kernels see; it divides `block_size`."""

    def slots(self, blocks: Sequence[int], positions: np.ndarray) -> Tensor:
        """int64 [n]: the slot of each position of a request that owns `blocks`."""
        table = np.asarray(blocks, dtype=np.int64)
        slots = table[positions // self.block_size] * self.block_size
        return torch.from_numpy(slots + positions % self.block_size).to(self.device)

    def kernel_blocks(self, blocks: Sequence[int]) -> np.ndarray:
        """int32: the kernel blocks of a request that owns `blocks`, in order."""
        ratio = self.block_size // self.kernel_block_size
        table = np.asarray(blocks, dtype=np.int32)
        return (table[:, None] * ratio + np.arange(ratio, dtype=np.int32)).reshape(-1)

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Rotated keys and values [n, kv_heads, head_dim], as vLLM's layers write theirs."""
        attention = self._attentions[layer]
        attention.impl.do_kv_cache_update(attention, keys, values, attention.kv_cache, slots)

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Copies of rotated keys and values [n, kv_heads, head_dim]."""
        attention = self._attentions[layer]
        cache = attention.kv_cache
        block, offset = slots // self.kernel_block_size, slots % self.kernel_block_size
        isa = getattr(attention, "isa", None)
        if isa is not None:
            return _read_cpu(cache, block, offset, isa)
        both = cache[block, :, offset]
        half = both.shape[-1] // 2
        return both[..., :half].clone(), both[..., half:].clone()

    def pages(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """All keys and all values, as [pages, kv_heads, `kernel_block_size`, head_dim], in place;
        `None` where the layout has no such view."""
        attention = self._attentions[layer]
        if getattr(attention, "isa", None) is not None or attention.kv_cache.stride(-1) != 1:
            return None
        keys, values = attention.kv_cache.tensor_split(2, dim=-1)
        return keys, values

    def check(self) -> None:
        """`UnsupportedModelError` unless what is written can be read, bit for bit.

        Uses the last block, so call it before the first request.
        """
        attention = self._attentions[0]
        last = attention.kv_cache.shape[0] * self.kernel_block_size
        slots = torch.arange(last - self.kernel_block_size, last, device=self.device)
        shape = (len(slots), attention.num_kv_heads, attention.head_size)
        generator = torch.Generator().manual_seed(0)
        keys, values = (
            torch.randn(shape, generator=generator).to(attention.kv_cache) for _ in range(2)
        )
        try:
            self.write(0, slots, keys, values)
            found = self.read(0, slots)
        except Exception as error:
            raise UnsupportedModelError(f"the KV cache cannot be read: {error}") from error
        if not (torch.equal(found[0], keys) and torch.equal(found[1], values)):
            raise UnsupportedModelError("the KV cache has a layout that we do not know")


def _read_cpu(cache: Tensor, block: Tensor, offset: Tensor, isa: str) -> tuple[Tensor, Tensor]:
    """The CPU backend packs a block's keys, then its values, for the instructions it uses."""
    blocks, heads, size, both = cache.shape
    dim, tokens = both // 2, len(block)
    keys, values = cache.reshape(blocks, heads, 2, size * dim).unbind(2)
    if isa == "amx":
        keys = keys.view(blocks, heads, size // 16, dim // 2, 16, 2)
        values = values.view(blocks, heads, dim // 16, size // 2, 16, 2)
        return (
            keys[block, :, offset // 16, :, offset % 16].reshape(tokens, heads, dim),
            values[block, :, :, offset // 2, :, offset % 2].reshape(tokens, heads, dim),
        )
    keys = keys.view(blocks, heads, dim, size)
    values = values.view(blocks, heads, size, dim)
    return keys[block, :, :, offset], values[block, :, offset]
