"""CCPE's pretraining phase: how much updates add to the positions that chunks behind them see.

In: many prompts of one task. Out: a `Profile`. Every prompt runs densely once; of each row of a
reuse chunk the gates towards an update before it are summed up, per layer and query head, and the
sums counted in bins one position wide (Algorithm 1 of CacheSlide, FAST 2026).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cacheslide_agents.chunks import EncodedPrompt, Span
from cacheslide_agents.errors import BackendError, DataError
from cacheslide_agents.policies.canonical import CopeModel
from cacheslide_agents.policies.draft import dense_plan
from cacheslide_agents.policies.recompute import Recompute
from cacheslide_agents.position.profile import (
    CanonicalEntry,
    Profile,
    bin_of,
    chunks_behind_updates,
)
from torch_cacheslide.jobs import Job
from torch_cacheslide.runtime import Runtime

ROW_BLOCK = 1024
"""Query rows whose gates towards an update are held at once."""
See = Callable[[int, Tensor, Tensor], None]
"""Layer, queries [heads, n, head_dim], keys [kv_heads, n, head_dim]."""


@dataclass
class _Count:
    """`histogram` int64 [layers, heads, npos], over the rows of `prompts` prompts."""

    histogram: Tensor
    prompts: int = 0


class Calibration:
    """Counts prompt by prompt; runs on the worker thread of the backend that owns `runtime`."""

    def __init__(self, runtime: Runtime, model: CopeModel) -> None:
        self._runtime, self._model = runtime, model
        self._counts: dict[tuple[str, str], _Count] = {}
        self._task: str | None = None

    def run(self, prompts: Iterable[EncodedPrompt], job: Job) -> None:
        """Add them all; `job` emits how many are done, and may be cancelled."""
        for number, prompt in enumerate(prompts, start=1):
            if job.cancelled.is_set():
                raise BackendError("the calibration was cancelled before all prompts were seen")
            self.add(prompt)
            job.emit(number)

    def add(self, prompt: EncodedPrompt) -> None:
        """Run one prompt. `DataError` if it is of another task than those before it."""
        if self._task not in (None, prompt.task):
            raise DataError(
                f"prompts of tasks {self._task!r} and {prompt.task!r} cannot share one profile; "
                "calibrate them apart"
            )
        self._task = prompt.task
        pairs = list(chunks_behind_updates(prompt.spans))
        if not pairs:
            return
        for chunk, update in pairs:
            self._count(chunk, update).prompts += 1
        ids = np.asarray(prompt.ids, dtype=np.int64)
        plan = dense_plan(ids, prompt.spans, Recompute(), outcome="cold", reason="calibration")
        with _watched(self._runtime.stack.attentions, partial(self._see, pairs)):
            self._runtime.run(plan, room=0)

    def profile(self) -> Profile:
        """`DataError` if no prompt had a reuse chunk behind an update."""
        if not self._counts:
            raise DataError(
                f"no prompt of task {self._task!r} has a reuse chunk behind an update (a chunk of "
                "role recompute), so there is nothing for CCPE to learn"
            )
        entries = tuple(
            CanonicalEntry.of(chunk, update, count.prompts, count.histogram.cpu())
            for (chunk, update), count in sorted(self._counts.items())
        )
        assert self._task is not None
        return Profile(self._task, self._model.digest, self._model.npos, entries)

    def _count(self, chunk: Span, update: Span) -> _Count:
        shape = (self._model.layers, self._model.heads, self._model.npos)
        device = self._runtime.stack.device
        empty = _Count(torch.zeros(shape, dtype=torch.int64, device=device))
        return self._counts.setdefault((chunk.id, update.id), empty)

    def _see(
        self, pairs: Sequence[tuple[Span, Span]], layer: int, query: Tensor, key: Tensor
    ) -> None:
        for chunk, update in pairs:
            rows, keys = query[:, chunk.start : chunk.stop], key[:, update.start : update.stop]
            bins = bin_of(gate_mass(rows, keys), self._model.npos)
            counted = self._counts[chunk.id, update.id].histogram[layer]
            counted.scatter_add_(-1, bins, torch.ones_like(bins))


def gate_mass(query: Tensor, key: Tensor) -> Tensor:
    """[heads, rows]: sums of sigmoid(q . k / sqrt(head_dim)) of rows [heads, rows, head_dim] over
    all of the keys [kv_heads, keys, head_dim], at least in float32."""
    wide = torch.promote_types(query.dtype, torch.float32)
    heads, rows, head_dim = query.shape
    grouped = query.to(wide).reshape(len(key), -1, head_dim) * head_dim**-0.5
    keys = key.to(wide).transpose(1, 2)
    masses = [torch.sigmoid(part @ keys).sum(-1) for part in grouped.split(ROW_BLOCK, dim=1)]
    return torch.cat(masses, dim=1).view(heads, rows)


@contextmanager
def _watched(attentions: Sequence[Any], see: See) -> Iterator[None]:
    """While it lasts, `see` gets what every attention layer projects, query heads first."""
    queries: dict[int, Tensor] = {}

    def keep(layer: int, _: nn.Module, __: Any, query: Tensor) -> None:
        queries[layer] = query

    def show(layer: int, _: nn.Module, __: Any, key: Tensor) -> None:
        head_dim = int(attentions[layer].head_dim)
        query, key = (
            each[0].view(each.shape[1], -1, head_dim).transpose(0, 1)
            for each in (queries.pop(layer), key)
        )
        see(layer, query, key)

    handles = []
    for layer, attention in enumerate(attentions):
        handles.append(attention.q_proj.register_forward_hook(partial(keep, layer)))
        handles.append(attention.k_proj.register_forward_hook(partial(show, layer)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
