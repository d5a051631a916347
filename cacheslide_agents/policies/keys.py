"""The keys a selector asks for, fetched only when it asks.

In: planned runs, the store, the backend's probe. Out: finite keys [tokens, kv_heads, head_dim],
16-bit ones widened to float32. Cached keys lie position-free in the store, so none is rotated here.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from cacheslide_agents.errors import NonFiniteError, ReuseError
from cacheslide_agents.pages.base import StoredContext
from cacheslide_agents.policies.base import ContextSource, Plan, PlannedRun, Probe
from cacheslide_agents.policies.match import Match
from cacheslide_agents.selection.base import Positions


class Keys:
    """Keys of one draft plan. `probed_layer_tokens` counts what the probe ran, over all layers."""

    def __init__(
        self, draft: Plan, match: Match, store: ContextSource, probe: Probe | None
    ) -> None:
        self._draft, self._match, self._store, self._probe = draft, match, store, probe
        self._probed: dict[int, Tensor] = {}
        self.probed_layer_tokens = 0

    def cached(self, positions: Positions, layer: int) -> Tensor:
        return cached_keys(self._store, self._draft.runs, positions, layer)

    def removed(self, layer: int) -> Tensor:
        """Keys of the cached context's tokens that are in no run; empty for chunks alone."""
        source = self._match.source
        if source is None:
            return self.cached(np.empty(0, dtype=np.int64), layer)
        spans = [(edit.cached_start, edit.cached_stop) for edit in self._match.edits]
        keys, _ = self._store.load(source, layer)
        gone = torch.from_numpy(_ranges(spans)).to(keys.device)
        return _checked(keys.index_select(1, gone).transpose(0, 1), "removed", layer)

    def new(self, layer: int) -> Tensor:
        """Keys the update tokens get at `layer`: runs them through layers 0..layer, once."""
        if layer not in self._probed:
            if self._probe is None:
                raise ReuseError("the selector asks for new keys, but this backend has no probe")
            update = _ranges([(edit.start, edit.stop) for edit in self._match.edits])
            keys = self._probe(self._draft, update, layer)
            self.probed_layer_tokens += len(update) * (layer + 1)
            self._probed[layer] = _checked(keys, "new", layer)
        return self._probed[layer]


def cached_keys(
    store: ContextSource, runs: Sequence[PlannedRun], positions: Positions, layer: int
) -> Tensor:
    """Cached keys of prompt `positions`, ascending, all inside `runs`, of which there is one."""
    parts: list[Tensor] = []
    for source, rows in _by_source(runs, positions) or [(runs[0].source, positions)]:
        first, stop = (int(rows.min()), int(rows.max()) + 1) if len(rows) else (0, 0)
        keys, _ = store.load(source, layer, [(first, stop)])
        parts.append(keys.index_select(1, torch.from_numpy(rows - first).to(keys.device)))
    return _checked(torch.cat(parts, dim=1).transpose(0, 1), "cached", layer)


def _by_source(
    runs: Sequence[PlannedRun], positions: Positions
) -> list[tuple[StoredContext, Positions]]:
    """Cached indices of `positions`, grouped while consecutive runs come from one source."""
    groups: list[tuple[StoredContext, list[Positions]]] = []
    for planned in runs:
        run = planned.run
        low, high = np.searchsorted(positions, (run.start, run.stop))
        if low == high:
            continue
        if not groups or groups[-1][0] is not planned.source:
            groups.append((planned.source, []))
        groups[-1][1].append(positions[low:high] - run.shift)
    return [(source, np.concatenate(rows)) for source, rows in groups]


def _ranges(spans: Sequence[tuple[int, int]]) -> Positions:
    """All integers of half-open `spans`, in order."""
    return np.concatenate([np.arange(*span, dtype=np.int64) for span in spans])


def _checked(keys: Tensor, kind: str, layer: int) -> Tensor:
    keys = keys.float() if keys.element_size() < 4 else keys
    if not torch.isfinite(keys).all():
        raise NonFiniteError(f"{kind} keys of layer {layer} hold NaN or infinity")
    return keys
