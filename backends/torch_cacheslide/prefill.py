"""Selective prefill: one planned prompt through the layers, active rows only.

In: a `Plan` (what is reused from where, which rows are active). Out: the logits of the last prompt
token, a filled working cache, and what it cost. Layer by layer: cached keys and values are loaded
and rotated to their new place (`load`), the active rows are computed and overwrite theirs.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import islice
from time import perf_counter

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cacheslide_agents.pages.base import PageStore
from cacheslide_agents.pages.loader import Loader
from cacheslide_agents.policies.base import Plan
from cacheslide_agents.position.base import Position
from cacheslide_agents.position.profile import CanonicalRows
from cacheslide_agents.selection.base import LayerSelector
from torch_cacheslide.cache import WorkingCache
from torch_cacheslide.correction import Correction
from torch_cacheslide.jobs import Interrupt
from torch_cacheslide.load import Decoupling, Loading, RunLoad
from torch_cacheslide.stack import DecoderStack

Rows = npt.NDArray[np.int64]


def go_on() -> None:
    """Nothing interrupts."""


@dataclass
class Prefilled:
    """`logits` [1, vocabulary]; `active` the rows of the last layer; `rows_per_layer` what ran.

    `finite` holds if neither the logits nor anything loaded held NaN or infinity. Loading overlaps
    with computing: the prefill took `compute_s` plus `wait_s`, the part of `load_s` that did not.
    """

    logits: Tensor
    active: Rows
    rows_per_layer: list[int] = field(default_factory=list)
    pairs: int = 0
    load_s: float = 0.0
    compute_s: float = 0.0
    wait_s: float = 0.0
    finite: bool = True
    residuals: dict[int, Tensor] = field(default_factory=dict)


class SelectivePrefill:
    """One request's way through the layers; use once."""

    def __init__(
        self,
        stack: DecoderStack,
        position: Position,
        store: PageStore,
        plan: Plan,
        cache: WorkingCache,
        *,
        loading: Loading | None = None,
        residual_layers: Collection[int] = (),
        interrupt: Interrupt = go_on,
        canonical: CanonicalRows | None = None,
    ) -> None:
        self._stack, self._store, self._plan, self._cache = stack, store, plan, cache
        cache.canonical = canonical
        self._device = stack.device
        positions = torch.from_numpy(plan.positions).to(self._device)
        cache.place(0, positions)
        self._cos, self._sin = position.cos_sin(positions, stack.dtype)
        self._load = RunLoad(plan, store, position, (self._cos, self._sin), cache)
        self._loading = loading or Loading()
        self._residual_layers = frozenset(residual_layers)
        self._interrupt = interrupt
        self._reserve: Rows = np.zeros(0, dtype=np.int64)
        self._corrected: Rows = np.zeros(0, dtype=np.int64)
        self._done = Prefilled(torch.empty(0), np.zeros(0, dtype=np.int64))

    def run(self) -> Prefilled:
        """`ReuseError` when a page cannot be loaded; whatever `interrupt` raises between layers."""
        started = perf_counter()
        loader = self._loading.loader(
            self._load, self._plan, self._store, self._stack.layers, self._device
        )
        self._cache.loader = loader
        try:
            hidden = self._layers(loader)
        finally:
            loader.close()
            self._cache.loader = self._cache.canonical = None
        done = self._done
        done.logits = self._stack.logits(hidden[:, -1:])
        done.active = self._rows
        done.finite = bool(done.logits.isfinite().all() & self._load.total.isfinite())
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        done.load_s, done.wait_s = loader.load_s, loader.wait_s
        done.compute_s = perf_counter() - started - done.wait_s
        return done

    def _layers(self, loader: Loader) -> Tensor:
        hidden = self._start()
        for layer in range(self._stack.layers):
            self._interrupt()
            loader.enter(layer)
            if self._loading.decoupling is Decoupling.OFF:
                loader.wait(layer)
            hidden = self._compute(layer, hidden)
            if layer in self._residual_layers:
                self._done.residuals[layer] = hidden[0]
            hidden = self._after(layer, hidden)
        return hidden

    def keys_at(self, rows: Rows, last_layer: int) -> Tensor:
        """Position-free keys [rows, kv_heads, head_dim] that `rows` alone get at `last_layer`."""
        self._set_rows(rows)
        hidden = self._embed(rows)
        for layer in range(last_layer + 1):
            self._load(layer)
            hidden = self._compute(layer, hidden)
        return self._cache.captured[last_layer][-1][1]

    def _start(self) -> Tensor:
        plan = self._plan
        if plan.narrow is not None:
            rows = np.arange(plan.head, len(plan.ids), dtype=np.int64)
            rows = np.union1d(rows, np.flatnonzero(plan.active))
        else:
            rows = np.flatnonzero(plan.active)
            self._corrected = rows[plan.hit[rows]]
        self._set_rows(rows)
        if plan.narrow is None:
            self._correct(self._unit_weights())
        return self._embed(rows)

    def _set_rows(self, rows: Rows) -> None:
        self._rows = rows
        index = torch.from_numpy(rows).to(self._device)
        self._cos_sin = self._cos[index][None], self._sin[index][None]
        self._cache.set_rows(rows)

    def _embed(self, rows: Rows) -> Tensor:
        return self._stack.embed(torch.from_numpy(self._plan.ids[rows]).to(self._device))

    def _compute(self, layer: int, hidden: Tensor) -> Tensor:
        self._done.rows_per_layer.append(len(self._rows))
        layouts = self._cache.layouts
        hidden = self._stack.layer(layer, hidden, self._cos_sin, self._cache, layouts)
        self._done.pairs += layouts.pairs(layer)
        return hidden

    def _after(self, layer: int, hidden: Tensor) -> Tensor:
        if layer + 1 == self._stack.layers:
            return hidden  # no layer is left to choose rows for
        narrow, gate = self._plan.narrow, self._plan.policy.gate
        if narrow is not None and layer == narrow.layer:
            return self._narrow(layer, narrow, hidden)
        chosen = self._cache.correction is not None
        if gate is not None and chosen and (layer + 1) % gate.every == 0:
            return self._pass_gate(layer, hidden)
        return hidden

    def _narrow(self, layer: int, selector: LayerSelector, hidden: Tensor) -> Tensor:
        """Rank the candidates by their new keys; all rows but active and chosen ones leave."""
        view = self._plan.view
        assert view is not None
        rows, keys = self._cache.captured[layer][-1]
        new = keys[torch.from_numpy(np.searchsorted(rows, view.candidates)).to(self._device)]
        cached = view.cached_keys(layer)
        ranked = selector.rank(view, new, cached)
        budget = selector.budget(len(view.candidates))
        self._corrected, self._reserve = np.sort(ranked[:budget]), ranked[budget:]
        kept = np.union1d(np.flatnonzero(self._plan.active), self._corrected)
        hidden = hidden[:, torch.from_numpy(np.searchsorted(rows, kept)).to(self._device)]
        self._set_rows(kept)
        weights = self._unit_weights()
        earned = self._plan.policy.fusion.weight(new.transpose(0, 1), cached.transpose(0, 1))
        if earned is not None:
            weights[torch.from_numpy(view.candidates).to(self._device)] = earned.to(weights.dtype)
        self._correct(weights)
        return hidden

    def _unit_weights(self) -> Tensor:
        """[prompt], at least float32: an unclamped weight may pass the range of float16."""
        dtype = torch.promote_types(self._stack.dtype, torch.float32)
        return torch.ones(len(self._plan.ids), dtype=dtype, device=self._device)

    def _correct(self, weights: Tensor) -> None:
        """Tell the cache which rows in flight are correction rows."""
        batch = np.searchsorted(self._rows, self._corrected)
        self._cache.correction = Correction(
            fusion=self._plan.policy.fusion,
            weights=weights,
            rows=torch.from_numpy(self._corrected).to(self._device),
            batch=torch.from_numpy(batch).to(self._device),
            watch=self._plan.policy.gate is not None,
        )
        self._cache.keep_apart(self._corrected, prompt=len(self._plan.ids))

    def _pass_gate(self, layer: int, hidden: Tensor) -> Tensor:
        """Rows the gate removes leave for good; the next ranked take their places."""
        gate, correction = self._plan.policy.gate, self._cache.correction
        assert gate is not None and correction is not None
        if correction.seen is None:
            return hidden
        removed = gate.removes(*correction.seen).cpu().numpy()
        if not removed.any():
            return hidden
        promoted = self._promote(layer, int(removed.sum()))
        stay = np.setdiff1d(self._rows, self._corrected[removed])
        rows = np.union1d(stay, promoted)
        next_hidden = hidden.new_empty(1, len(rows), hidden.shape[-1])
        next_hidden[:, np.searchsorted(rows, stay)] = hidden[:, np.searchsorted(self._rows, stay)]
        for row, state in zip(promoted, self._cached_states(layer, promoted), strict=True):
            next_hidden[0, np.searchsorted(rows, row)] = state
        self._corrected = np.union1d(self._corrected[~removed], promoted)
        self._set_rows(rows)
        self._correct(correction.weights)
        return next_hidden

    def _promote(self, layer: int, places: int) -> Rows:
        """The next ranked candidates whose residual at this layer is stored."""
        stored = (row for row in self._reserve if self._residual(layer, int(row)) is not None)
        promoted = np.sort(np.fromiter(islice(stored, places), dtype=np.int64))
        self._reserve = self._reserve[~np.isin(self._reserve, promoted)]
        return promoted

    def _cached_states(self, layer: int, rows: Rows) -> list[Tensor]:
        states = [self._residual(layer, int(row)) for row in rows]
        return [state for state in states if state is not None]

    def _residual(self, layer: int, row: int) -> Tensor | None:
        for planned in self._plan.runs:
            if planned.run.start <= row < planned.run.stop:
                states = self._store.residual(planned.source, layer)
                there = row - planned.run.shift
                return states[there] if states is not None and there < len(states) else None
        return None
