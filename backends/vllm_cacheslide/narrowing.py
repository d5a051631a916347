"""Selective prefill whose rows are chosen on the way, by the keys they get at one layer.

In: a job whose plan has a `narrow` selector. Out: its slots filled, as in `SelectivePrefill`. Up to
that layer every row after the common head is computed; then the candidates are ranked, and only the
active and the chosen ones go on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor
from vllm.distributed import tensor_model_parallel_all_gather

from cacheslide_agents.errors import ReuseError
from cacheslide_agents.pages.base import PageStore
from cacheslide_agents.policies.keys import cached_keys
from cacheslide_agents.position.base import Position
from cacheslide_agents.selection.base import SelectionView
from vllm_cacheslide.agreement import agree
from vllm_cacheslide.loading import Load
from vllm_cacheslide.passes import LayerPass, State, attempt
from vllm_cacheslide.rows import Job, Rows, batches


class Narrowing:
    """One job's way through the layers; use once."""

    def __init__(
        self, layers: LayerPass, position: Position, store: PageStore, most_rows: int
    ) -> None:
        self._layers, self._position, self._store = layers, position, store
        self._most_rows = most_rows

    def run(self, job: Job) -> None:
        plan, depth = job.plan, self._layers.decoder.layers
        assert plan.narrow is not None
        wide, there = job.rows, min(plan.narrow.layer + 1, depth)
        head = plan.hit & (np.arange(len(plan.ids)) < plan.head)
        state, keys = self._wide(job, range(there), head)
        kept = self._kept(job, keys)
        state = state.rows(self._index(np.searchsorted(wide, kept)))
        computed = np.zeros(len(plan.ids), dtype=np.bool_)
        computed[kept] = True
        computed[-1] = True
        job.rows = kept
        self._rest(job, range(there, depth), plan.hit & ~computed, state)
        job.rows_per_layer = (*[len(wide)] * there, *[len(kept)] * (depth - there))

    def _wide(self, job: Job, layers: range, head: np.ndarray) -> tuple[State, Tensor]:
        """All rows through `layers`; their states, and position-free keys at the last of them."""
        load = self._load(job, head)
        states: list[State] = []
        found: list[Tensor] = []
        with self._captured(layers[-1], found):
            loads = {job: load}
            for batch in batches([job], self._most_rows):
                states.append(self._layers.run(batch, layers, loads))
                loads = {}
        attempt(job, load.check)
        cos, sin = self._position.cos_sin(self._index(job.rows))
        rotated = torch.cat(found).transpose(0, 1).float()
        keys = self._position.unrotate(rotated, cos, sin).transpose(0, 1)
        residuals = [state.residual for state in states if state.residual is not None]
        return State(torch.cat([state.hidden for state in states]), torch.cat(residuals)), keys

    def _rest(self, job: Job, layers: range, wanted: np.ndarray, state: State) -> None:
        load = self._load(job, wanted)
        loads, done = {job: load}, 0
        for batch in batches([job], self._most_rows):
            index = torch.arange(done, done + len(batch), device=state.hidden.device)
            self._layers.run(batch, layers, loads, state.rows(index))
            loads, done = {}, done + len(batch)
        self._layers.load(layers, loads)  # where nothing was computed
        load.check()

    def _kept(self, job: Job, keys: Tensor) -> Rows:
        """Active rows and the best of the candidates, ascending. Alike on every rank."""
        plan, narrow = job.plan, job.plan.narrow
        assert narrow is not None
        view = self._view(job)
        new = keys[self._index(np.searchsorted(job.rows, view.candidates))]
        cached = self._cached(job, view, narrow.layer)
        ranked = narrow.rank(view, _of_all_ranks(new), _of_all_ranks(cached))
        chosen = ranked[: narrow.budget(len(view.candidates))]
        return np.union1d(np.flatnonzero(plan.active[:-1]), chosen)

    def _cached(self, job: Job, view: SelectionView, layer: int) -> Tensor:
        """Stored keys of the candidates. Raises on every rank if one cannot go on."""
        found: list[Tensor] = []
        attempt(job, lambda: found.append(view.cached_keys(layer)))
        agree([job])
        if job.trouble:
            raise ReuseError(job.trouble)
        return found[0]

    def _view(self, job: Job) -> SelectionView:
        """What the selector ranks; plans travel without it."""
        plan = job.plan

        def cached(layer: int) -> Tensor:
            keys = cached_keys(self._store, plan.runs, view.candidates, layer)
            return keys.float().to(self._layers.paged.device)

        view = SelectionView(
            plan.ids,
            plan.ids[:0],
            tuple(p.run for p in plan.runs),
            job.edits,
            cached,
            _unknown,
            _unknown,
        )
        return view

    def _load(self, job: Job, wanted: np.ndarray) -> Load:
        return Load(job, wanted, self._store, self._position, self._layers.paged)

    def _index(self, rows: Rows) -> Tensor:
        return torch.from_numpy(rows).to(self._layers.paged.device)

    @contextmanager
    def _captured(self, layer: int, found: list[Tensor]) -> Iterator[None]:
        """Rotated keys [rows, kv_heads, head_dim] that pass through a layer's attention."""
        decoder = self._layers.decoder
        shape = (-1, decoder.kv_heads, decoder.head_dim)

        def hook(_: object, inputs: tuple[Tensor, Tensor, Tensor]) -> None:
            found.append(inputs[1].reshape(shape).clone())

        handle = decoder.attentions[layer].register_forward_pre_hook(hook)
        try:
            yield
        finally:
            handle.remove()


def _of_all_ranks(keys: Tensor) -> Tensor:
    """Keys of every rank's heads, side by side; they must choose the same tokens."""
    gathered: Tensor = tensor_model_parallel_all_gather(keys.contiguous(), dim=1)
    return gathered


def _unknown(layer: int) -> Tensor:
    raise ReuseError(
        f"the selector asks for removed or new keys of layer {layer}; on vLLM there are only those "
        "of the reused tokens"
    )
