"""What outlives a request: its keys and values, read from vLLM's blocks into the page store.

In: a finished request's blocks. Out: a stored context. Keys come out of the blocks rotated and are
turned back in float32; runs that were reused and not corrected are taken from the context they came
from, so that they stay the same bits turn after turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from cacheslide_agents.pages.base import LayerKV, PageStore, ReusedRun, StoredContext
from cacheslide_agents.policies.base import PlannedRun
from cacheslide_agents.policies.kept import reused_runs
from cacheslide_agents.position.base import Position
from vllm_cacheslide.orders import Keep, Order
from vllm_cacheslide.paging import PagedCache


class Keeping:
    """Stores contexts from one rank's blocks."""

    def __init__(
        self, store: PageStore, position: Position, paged: PagedCache, layers: int
    ) -> None:
        self._store, self._position, self._paged, self._layers = store, position, paged, layers

    def keep(self, keep: Keep, contexts: Mapping[int, StoredContext], dense: bool) -> bool:
        """False when the store refused. `dense`: the prefill fell back, nothing was reused."""
        context = keep.context
        narrowed = keep.order.plan.narrow is not None  # what was corrected differs between layers
        reused = () if dense or narrowed else _reused(keep.order, contexts)
        with self._store.lease({run.source for run in reused}) as lease:
            rows = _rows_to_read(len(context), reused)
            slots = self._paged.slots(keep.blocks, rows)
            cos, sin = self._position.cos_sin(torch.from_numpy(rows).to(self._paged.device))
            index = torch.from_numpy(rows).to(self._paged.device)
            layers = [
                self._read(layer, slots, cos, sin, index, len(context))
                for layer in range(self._layers)
            ]
            return self._store.put(context, layers, reused=reused, lease=lease)

    def _read(
        self, layer: int, slots: Tensor, cos: Tensor, sin: Tensor, index: Tensor, tokens: int
    ) -> LayerKV:
        keys, values = (part.transpose(0, 1) for part in self._paged.read(layer, slots))
        free = self._position.unrotate(keys.float(), cos, sin).to(keys.dtype)
        if len(index) == tokens:
            return free, values.contiguous()
        shape = (keys.shape[0], tokens, keys.shape[2])
        return (
            keys.new_zeros(shape).index_copy_(1, index, free),
            keys.new_zeros(shape).index_copy_(1, index, values),
        )


def _reused(order: Order, contexts: Mapping[int, StoredContext]) -> tuple[ReusedRun, ...]:
    """Runs whose source is still stored; the others are read like computed tokens."""
    runs = [
        PlannedRun(planned.run, contexts[number])
        for planned, number in zip(order.plan.runs, order.sources, strict=True)
        if number in contexts
    ]
    return reused_runs(runs, order.plan.active)


def _rows_to_read(tokens: int, reused: Sequence[ReusedRun]) -> np.ndarray:
    """int64: positions that are not taken from where they were reused."""
    read = np.ones(tokens, dtype=np.bool_)
    for run in reused:
        read[run.start : run.start + run.length] = run.corrected
    return np.flatnonzero(read)
