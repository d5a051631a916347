"""Contexts with made-up keys and values, turns that reuse one another, and a model of a store.

In: lengths, seeds, sessions. Out: what the store is given, and what it must give back.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from cacheslide_agents.errors import StoreError
from cacheslide_agents.pages import (
    PAGE_TOKENS,
    ContextKey,
    LayerKV,
    ReusedRun,
    SlideStore,
    StoredContext,
)

KEY = ContextKey("model", "default", "task")
LAYERS, HEADS, HEAD_DIM = 3, 2, 4
TOKEN_BYTES = LAYERS * 2 * HEADS * HEAD_DIM * 4
BLOCK_BYTES = PAGE_TOKENS * TOKEN_BYTES


def context_of(
    ids: Sequence[int] | npt.NDArray[np.int64],
    session: str | None = None,
    *,
    key: ContextKey = KEY,
    isolated: bool = False,
    exact: bool = True,
) -> StoredContext:
    tokens = np.array(ids, dtype=np.int64)
    return StoredContext(
        key, tokens, np.full(len(tokens), exact), session=session, isolated=isolated
    )


def layers_of(tokens: int, seed: int = 0, layers: int = LAYERS) -> list[LayerKV]:
    made = torch.Generator().manual_seed(seed)
    shape = (HEADS, tokens, HEAD_DIM)
    return [
        (torch.randn(shape, generator=made), torch.randn(shape, generator=made))
        for _ in range(layers)
    ]


@dataclass
class Turn:
    """A context and its true layers."""

    context: StoredContext
    layers: list[LayerKV]


def first_turn(rng: np.random.Generator, tokens: int, session: str | None = None) -> Turn:
    ids = rng.integers(0, 1 << 30, tokens)
    return Turn(context_of(ids, session), layers_of(tokens, int(rng.integers(1 << 30))))


def next_turn(
    rng: np.random.Generator, last: Turn, new: int, *, corrected: float = 0.1, removed: int = 0
) -> tuple[Turn, list[LayerKV], list[ReusedRun]]:
    """All of `last` but `removed` tokens in its middle, between `new` tokens before and after.

    Besides the turn, the layers as a backend hands them over: only what `put` may read is true.
    """
    head = int(rng.integers(1, len(last.context) - removed + 1))
    cuts = [(0, head), (head + removed, len(last.context))]
    before = int(rng.integers(0, new + 1))
    ids, runs, at = [rng.integers(0, 1 << 30, before)], [], before
    for start, stop in cuts:
        flags = rng.random(stop - start) < corrected
        if stop > start:
            runs.append(ReusedRun(last.context, at, start, stop - start, flags))
        ids.append(last.context.ids[start:stop])
        at += stop - start
    ids.append(rng.integers(0, 1 << 30, new - before))
    context = context_of(np.concatenate(ids), last.context.session)
    fresh = layers_of(len(context), int(rng.integers(1 << 30)))
    given = [(keys.clone(), values.clone()) for keys, values in fresh]
    for run in runs:
        kept = np.flatnonzero(~run.corrected)
        for layer in range(LAYERS):
            for true, lie, old in zip(fresh[layer], given[layer], last.layers[layer], strict=True):
                true[:, kept + run.start] = old[:, kept + run.cached_start]
                lie[:, kept + run.start] = float("nan")
    return Turn(context, fresh), given, runs


def same(store: SlideStore, turn: Turn) -> bool:
    """Whether the store gives back this turn's layers, bit for bit."""
    return all(
        torch.equal(mine, true)
        for layer, pair in enumerate(turn.layers)
        for mine, true in zip(store.load(turn.context, layer), pair, strict=True)
    )


def found_again(store: SlideStore, turn: Turn) -> StoredContext | None:
    """The stored context with the turn's tokens and session, in a store that was reopened."""
    for context in store.find(turn.context.key, turn.context.session):
        if context.session == turn.context.session and np.array_equal(
            context.ids, turn.context.ids
        ):
            return context
    return None


def told_in_a_child(act: Callable[[], object]) -> str:
    """The `StoreError` that `act` raises in a forked child; empty if it raises none."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            act()
        except StoreError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        told = pipe.read().decode()
    os.waitpid(child, 0)
    return told
