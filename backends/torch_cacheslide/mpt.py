"""MPT decoders: transformers' own modules, with attention over the working cache biased by ALiBi.

In: token ids or hidden states of the rows in flight. Out: hidden states, logits. transformers' MPT
attention wants scores of all queries with all keys, so the attention is ours and the rest theirs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from cacheslide_agents.position.alibi import Alibi
from torch_cacheslide.cache import WorkingCache
from torch_cacheslide.layout import Block, Layout, Layouts
from torch_cacheslide.stack import DecoderStack

BIASED_ROWS = 64
"""Query rows at a time: their bias is as large as their attention scores."""


class MptStack(DecoderStack):
    """The layers of an `MptForCausalLM`."""

    def __init__(self, model: Any) -> None:
        config = model.config
        self._embedding = model.transformer.wte
        self._norm = model.transformer.norm_f
        self._head = model.lm_head
        self._blocks = list(model.transformer.blocks)
        self._alibi = Alibi.from_config(config)
        self.layers = len(self._blocks)
        self.kv_heads = int(config.n_heads)
        self.head_dim = int(config.hidden_size // config.n_heads)
        self.dtype = model.dtype
        self.device = model.device

    def layer(
        self,
        index: int,
        hidden: Tensor,
        cos_sin: tuple[Tensor, Tensor],
        cache: WorkingCache,
        layout: Layouts,
    ) -> Tensor:
        block = self._blocks[index]
        mixed = block.attn.Wqkv(block.norm_1(hidden))
        if block.attn.clip_qkv:
            mixed = mixed.clamp(-block.attn.clip_qkv, block.attn.clip_qkv)
        query, key, value = (
            part.view(*part.shape[:2], self.kv_heads, self.head_dim) for part in mixed.chunk(3, 2)
        )
        cache.capture(index, key)
        keys, values = cache.update(key.transpose(1, 2), value.transpose(1, 2), index)
        query = query.transpose(1, 2) * (block.attn.softmax_scale * self.head_dim**0.5)
        attended = [
            self._attend(query, keys, values, part, cache.positions_of(index, part))
            for part in _parts(layout.of(index), hidden.device)
        ]
        joined = torch.cat(attended, dim=2).transpose(1, 2).flatten(2)
        hidden = hidden + block.attn.out_proj(joined)
        output: Tensor = block.ffn(block.norm_2(hidden), hidden)
        return output

    def _attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        block: Block,
        positions: tuple[Tensor, Tensor],
    ) -> Tensor:
        """[1, heads, rows of the block, head_dim]; `positions` of its rows and of its keys."""
        slots = slice(block.first, block.keys)
        bias = self._alibi.bias(*positions)
        if block.mask is not None:
            bias = bias.masked_fill(~block.mask, -torch.inf)
        here = query[:, :, block.start : block.stop]
        return scaled_dot_product_attention(
            here, keys[:, :, slots], values[:, :, slots], bias[None].to(here.dtype)
        )


def _parts(blocks: Layout, device: torch.device) -> list[Block]:
    """The same attention in blocks of few rows, causal ones with a mask."""
    return [
        _part(block, start, min(start + BIASED_ROWS, block.stop), device)
        for block in blocks
        for start in range(block.start, block.stop, BIASED_ROWS)
    ]


def _part(block: Block, start: int, stop: int, device: torch.device) -> Block:
    if block.causal:
        end = block.keys - block.stop + stop
        rows = torch.arange(end - (stop - start), end, device=device)
        seen = torch.arange(block.first, end, device=device) <= rows[:, None]
        return Block(start, stop, end, seen, first=block.first)
    mask = block.mask
    if mask is not None:
        mask = mask[start - block.start : stop - block.start]
    return replace(block, start=start, stop=stop, mask=mask)
