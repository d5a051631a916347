"""A batch of rows through some of the layers, what it loads placed just ahead of it.

In: a batch, a range of layers, hidden states where the range does not start at the embedding. Out:
hidden states. Trouble of one job is written down in it and does not disturb the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from cacheslide_agents.errors import NonFiniteError
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
    """One rank's layers over its paged cache."""

    def __init__(self, decoder: Decoder, paged: PagedCache, attention: RowAttention) -> None:
        self.decoder, self.paged, self.attention = decoder, paged, attention

    def run(self, batch: Batch, layers: range, loads: Loads, state: State | None = None) -> State:
        """`state` [rows of the batch]; `None` where `layers` start with the embedding."""
        started, loaded = perf_counter(), _load_s(loads)
        places = np.concatenate([rows for _, rows in batch.parts])
        positions = torch.from_numpy(places).to(self.paged.device)
        slots = torch.cat([self.paged.slots(job.blocks, rows) for job, rows in batch.parts])
        state = state or self._embedded(batch)
        with self.attention.entered(batch, slots, positions):
            for layer in layers:
                self.place(layer, loads)
                state = State(*self.decoder.layer(layer, positions, state.hidden, state.residual))
        finite = state.finite()
        seconds = perf_counter() - started - (_load_s(loads) - loaded)
        _account(batch, len(layers), finite, seconds)
        return state

    def place(self, layer: int, loads: Loads) -> None:
        for job, load in loads.items():
            if not job.trouble:
                attempt(job, partial(load.place, layer))

    def _embedded(self, batch: Batch) -> State:
        ids = np.concatenate([job.plan.ids[rows] for job, rows in batch.parts])
        return State(self.decoder.embed(torch.from_numpy(ids).to(self.paged.device)))


def _load_s(loads: Loads) -> float:
    return sum(job.load_s for job in loads)


def _account(batch: Batch, layers: int, finite: np.ndarray, seconds: float) -> None:
    """Shares of the time by rows; a row that is not finite spoils its job."""
    done = 0
    for job, rows in batch.parts:
        job.compute_s += seconds * len(rows) / len(batch)
        job.pairs += int(rows.sum() + len(rows)) * layers
        if not finite[done : done + len(rows)].all():
            job.fail(NonFiniteError("hidden states of the reused prompt are not finite"))
        done += len(rows)
