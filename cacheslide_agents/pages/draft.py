"""How a new context will lie in blocks: what it shares, what it corrects, what it adds.

In: a context, the runs it reused, which blocks may be corrected. Out: its entry, nothing changed
yet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from cacheslide_agents.errors import PageError
from cacheslide_agents.pages.base import PAGE_TOKENS, ReusedRun, StoredContext
from cacheslide_agents.pages.block import Block
from cacheslide_agents.pages.entry import Entry
from cacheslide_agents.pages.geometry import Geometry

Ints = npt.NDArray[np.int64]
LEAST_LIVE = 0.5
"""Share of rows in use below which a context gets blocks of its own: a load then reads, and memory
holds, at most twice what it needs."""
SLACK_BLOCKS = 2
"""Blocks that a context may leave mostly empty whatever its length."""


@dataclass(frozen=True)
class Draft:
    """Tokens `corrected` overwrite rows of older blocks, tokens `fresh` fill `new_blocks`; with
    `anew` reused rows have to be copied there, too.
    """

    entry: Entry
    new_blocks: tuple[Block, ...]
    corrected: Ints
    fresh: Ints
    anew: bool = False


def draft(
    context: StoredContext,
    geometry: Geometry,
    residuals: Mapping[int, Tensor],
    runs: Sequence[tuple[Entry, ReusedRun]],
    may_correct: Callable[[Block], bool],
) -> Draft:
    """`PageError` when a run does not lie inside the context and its source, or meets another."""
    tokens = len(context)
    blocks: dict[Block, int] = {}
    block_of, row_of = np.full(tokens, -1, dtype=np.int64), np.zeros(tokens, dtype=np.int64)
    corrected = np.zeros(tokens, dtype=np.bool_)
    for source, run in runs:
        _check(run, source, geometry, block_of)
        there = slice(run.cached_start, run.cached_start + run.length)
        here = slice(run.start, run.start + run.length)
        numbers = np.array([blocks.setdefault(block, len(blocks)) for block in source.blocks])
        block_of[here], row_of[here] = numbers[source.block_of[there]], source.row_of[there]
        corrected[here] = run.corrected
    in_place = _in_place(list(blocks), block_of, row_of, corrected, may_correct)
    fresh = (block_of < 0) | (corrected & ~in_place)
    shared = len(np.unique(block_of[~fresh]))
    rows = PAGE_TOKENS * (shared + -(-int(fresh.sum()) // PAGE_TOKENS) - SLACK_BLOCKS)
    anew = shared > 0 and tokens < LEAST_LIVE * rows
    if anew:
        fresh, in_place = np.ones(tokens, dtype=np.bool_), np.zeros(tokens, dtype=np.bool_)
    return _laid_out(
        context, geometry, residuals, list(blocks), block_of, row_of, fresh, in_place, anew
    )


def _laid_out(
    context: StoredContext,
    geometry: Geometry,
    residuals: Mapping[int, Tensor],
    blocks: list[Block],
    block_of: Ints,
    row_of: Ints,
    fresh: npt.NDArray[np.bool_],
    in_place: npt.NDArray[np.bool_],
    anew: bool,
) -> Draft:
    places = np.arange(int(fresh.sum()))
    block_of[fresh], row_of[fresh] = len(blocks) + places // PAGE_TOKENS, places % PAGE_TOKENS
    new = [Block(geometry) for _ in range(-(-len(places) // PAGE_TOKENS))]
    entry = Entry(context, geometry, [*blocks, *new], block_of, row_of, residuals)
    entry.shed()
    return Draft(entry, tuple(new), np.flatnonzero(in_place), np.flatnonzero(fresh), anew)


def _in_place(
    blocks: Sequence[Block],
    block_of: Ints,
    row_of: Ints,
    corrected: npt.NDArray[np.bool_],
    may_correct: Callable[[Block], bool],
) -> npt.NDArray[np.bool_]:
    """Which corrections go where the old row is: not where another token has the same row."""
    if not corrected.any():
        return corrected
    asked = set(block_of[corrected].tolist())
    allowed = np.array([at in asked and may_correct(block) for at, block in enumerate(blocks)])
    rows = np.where(block_of < 0, -1 - np.arange(len(block_of)), block_of * PAGE_TOKENS + row_of)
    _, inverse, times = np.unique(rows, return_inverse=True, return_counts=True)
    once = times[inverse.reshape(-1)] == 1
    in_place: npt.NDArray[np.bool_] = corrected & allowed[block_of] & once
    return in_place


def _check(run: ReusedRun, source: Entry, geometry: Geometry, block_of: Ints) -> None:
    what = f"a reused run of {run.length} tokens at {run.start}, from {run.cached_start}"
    inside = run.start >= 0 and run.start + run.length <= len(block_of)
    known = run.cached_start >= 0 and run.cached_start + run.length <= len(source.context)
    if not (inside and known) or len(run.corrected) != run.length:
        raise PageError(
            f"{what}, passes the {len(block_of)} tokens of its context or the "
            f"{len(source.context)} of its source, or has {len(run.corrected)} flags"
        )
    if (block_of[run.start : run.start + run.length] >= 0).any():
        raise PageError(f"{what}, overlaps another one")
    if source.geometry != geometry:
        raise PageError(f"{what}, comes from a context of another geometry: {source.geometry}")
