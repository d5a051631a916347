"""A batch of rows through some of the layers, what it loads placed ahead of it.

In: a batch, a range of layers, hidden states where the range does not start at the embedding. Out:
hidden states. Trouble of one job is written down in it and does not disturb the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from cacheslide_agents.errors import NonFiniteError
from cacheslide_agents.pages.loader import Fill, Loader, loader_for
from vllm_cacheslide.attention import RowAttention
from vllm_cacheslide.decoder import Decoder
from vllm_cacheslide.loading import Load
from vllm_cacheslide.paging import PagedCache
from vllm_cacheslide.rows import Batch, Job

Loads = Mapping[Job, Load]


@dataclass(frozen=True)
class State:
    """Hidden states and residual [rows, hidden] between two layers."""

    hidden: Tensor
    residual: Tensor | None = None

    def rows(self, index: Tensor) -> State:
        residual = None if self.residual is None else self.residual[index]
        return State(self.hidden[index], residual)

    def finite(self) -> np.ndarray:
        """bool [rows]."""
        total = self.hidden if self.residual is None else self.hidden + self.residual
        finite: np.ndarray = torch.isfinite(total).all(dim=-1).cpu().numpy()
        return finite


def attempt(job: Job, step: Callable[[], object]) -> None:
    """`step()`, its error written down in the job."""
    try:
        step()
    except Exception as error:
        job.fail(error)


class LayerPass:
    """One rank's layers over its paged cache.

    `prefetch`: layers that loads are ahead of computation, in a thread (on CUDA a stream) of their
    own; `None`: where pages come from SSD or go to a device.
    """

    def __init__(
        self,
        decoder: Decoder,
        paged: PagedCache,
        attention: RowAttention,
        prefetch: int | None = None,
    ) -> None:
        self.decoder, self.paged, self.attention = decoder, paged, attention
        self._prefetch = prefetch

    def run(self, batch: Batch, layers: range, loads: Loads, state: State | None = None) -> State:
        """`state` [rows of the batch]; `None` where `layers` start with the embedding."""
        started = perf_counter()
        places = np.concatenate([rows for _, rows in batch.parts])
        positions = torch.from_numpy(places).to(self.paged.device)
        slots = torch.cat([self.paged.slots(job.blocks, rows) for job, rows in batch.parts])
        state = state or self._embedded(batch)
        with (
            self.attention.entered(batch, slots, positions),
            self._loading(layers, loads) as loader,
        ):
            for at, layer in enumerate(layers):
                loader.enter(at)
                loader.wait(at)
                state = State(*self.decoder.layer(layer, positions, state.hidden, state.residual))
        finite = state.finite()
        seconds = perf_counter() - started - loader.wait_s
        _account(batch, len(layers), finite, seconds)
        return state

    def load(self, layers: range, loads: Loads) -> None:
        """Where no row is left to compute."""
        with self._loading(layers, loads) as loader:
            for at in range(len(layers)):
                loader.enter(at)
                loader.wait(at)

    @contextmanager
    def _loading(self, layers: range, loads: Loads) -> Iterator[Loader]:
        """Loads of `layers`, ahead of computation where that gains something.

        Rows that are computed are not loaded, so the two never write to one slot.
        """
        loads = {job: load for job, load in loads.items() if load}
        loader = self._loader(lambda at: _place(layers[at], loads), len(layers), loads)
        before = {job: job.load_s for job in loads}
        try:
            yield loader
        finally:
            loader.close()
        spent = {job: job.load_s - before[job] for job in loads}
        total = sum(spent.values())
        for job in loads if total else ():
            job.wait_s += loader.wait_s * spent[job] / total

    def _loader(self, fill: Fill, layers: int, loads: Loads) -> Loader:
        def gains() -> bool:
            return any(load.needs_ssd for load in loads.values())

        depth = self._prefetch if loads else 0
        return loader_for(fill, layers, depth, self.paged.device, gains)

    def _embedded(self, batch: Batch) -> State:
        ids = np.concatenate([job.plan.ids[rows] for job, rows in batch.parts])
        return State(self.decoder.embed(torch.from_numpy(ids).to(self.paged.device)))


def _place(layer: int, loads: Loads) -> None:
    for job, load in loads.items():
        if not job.trouble:
            attempt(job, partial(load.place, layer))


def _account(batch: Batch, layers: int, finite: np.ndarray, seconds: float) -> None:
    """Shares of the time by rows; a row that is not finite spoils its job."""
    done = 0
    for job, rows in batch.parts:
        job.compute_s += seconds * len(rows) / len(batch)
        job.pairs += int(rows.sum() + len(rows)) * layers
        if not finite[done : done + len(rows)].all():
            job.fail(NonFiniteError("hidden states of the reused prompt are not finite"))
        done += len(rows)
