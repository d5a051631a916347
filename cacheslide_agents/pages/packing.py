"""Few corrected rows of many dirty blocks, put together in new blocks.

In: dirty blocks in memory. Out: new blocks whose bytes lie in staging memory, and which row went
where. A block of which 2 tokens of 16 were corrected then costs an eighth of its bytes on SSD: the
copy it has there stays good for the other 14.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from cacheslide_agents.pages.arena import Arena
from cacheslide_agents.pages.base import PAGE_TOKENS
from cacheslide_agents.pages.block import Block
from cacheslide_agents.pages.entry import Entry

MOST_PACKED = PAGE_TOKENS // 2
"""Corrected rows of a block up to which it is packed; with more it is written whole, since each
later load would read almost two pages for one."""

Moves = dict[int, tuple[Block, int]]


@dataclass
class Packed:
    """`moves[block][row]` is where that row now lies; `blocks[i]` is slot i of `staging`."""

    blocks: list[Block] = field(default_factory=list)
    moves: dict[Block, Moves] = field(default_factory=dict)
    staging: Arena | None = None


def may_be_packed(block: Block) -> bool:
    few = 0 < block.corrected.bit_count() <= MOST_PACKED
    return few and block.copy is not None and not block.busy


def pack(dirty: Sequence[Block], arena: Arena) -> Packed:
    """Copy the corrected rows of `dirty` together, apart for blocks with other owners."""
    packed = Packed()
    sources: list[tuple[int, int]] = []
    targets: list[tuple[int, int]] = []
    groups: dict[frozenset[Entry], list[Block]] = {}
    for block in dirty:
        groups.setdefault(frozenset(block.owners), []).append(block)
    for group in groups.values():
        row = PAGE_TOKENS
        for block in group:
            moves = packed.moves.setdefault(block, {})
            for old in rows_of(block.corrected):
                if row == PAGE_TOKENS:
                    packed.blocks.append(Block(block.geometry))
                    row = 0
                assert block.slot is not None
                moves[old] = (packed.blocks[-1], row)
                sources.append((block.slot, old))
                targets.append((len(packed.blocks) - 1, row))
                row += 1
    if packed.blocks:
        packed.staging = _copied(arena, sources, targets, len(packed.blocks))
    return packed


def rows_of(bits: int) -> list[int]:
    return [row for row in range(PAGE_TOKENS) if bits >> row & 1]


def _copied(
    arena: Arena,
    sources: Sequence[tuple[int, int]],
    targets: Sequence[tuple[int, int]],
    blocks: int,
) -> Arena:
    staging = Arena.staging(arena.geometry, blocks)
    from_slots, from_rows = np.array(sources, dtype=np.int64).T.copy()
    to_slots, to_rows = np.array(targets, dtype=np.int64).T.copy()
    for layer in range(arena.geometry.layers):
        keys, values = arena.read(from_slots, from_rows, layer)
        staging.write(to_slots, to_rows, layer, (keys, values))
    return staging
