"""Correction rows on their way through the layers: fusion with the cached values, the gate's view.

In: new keys and values of the rows in flight, and the cached ones they are about to replace.
Out: what is written to the cache, and the pair of keys the gate compares.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from cacheslide_agents.selection.fusion import Fusion


@dataclass
class Correction:
    """`rows` [c] are the correction rows' prompt indices, `batch` [c] their places in the batch.

    `weights` [n] holds, per prompt index, the fusion weight earned at the layer before (1 where
    there was none). `seen` is (new, cached) keys [kv_heads, c, head_dim] of the last layer that
    ran, both rotated alike; kept only when `watch` is set, for the gate.
    """

    fusion: Fusion
    weights: Tensor
    rows: Tensor
    batch: Tensor
    watch: bool
    seen: tuple[Tensor, Tensor] | None = None

    def apply(
        self, keys: Tensor, values: Tensor, all_keys: Tensor, all_values: Tensor
    ) -> tuple[Tensor, Tensor]:
        """[kv_heads, rows in flight, head_dim] in and out; `all_*` still hold the cached layer."""
        if not len(self.rows) or not (self.fusion.needs_cached or self.watch):
            return keys, values
        new, cached = keys.index_select(1, self.batch), all_keys.index_select(1, self.rows)
        if self.watch:
            self.seen = (new, cached)
        if not self.fusion.needs_cached:
            return keys, values
        weight = self.weights.index_select(0, self.rows)
        new_values = values.index_select(1, self.batch)
        cached_values = all_values.index_select(1, self.rows)
        next_weight = self.fusion.weight(new, cached)
        if next_weight is not None:
            self.weights.index_copy_(0, self.rows, next_weight.to(self.weights.dtype))
        return (
            keys.index_copy(1, self.batch, self.fusion.fuse(new, cached, weight)),
            values.index_copy(1, self.batch, self.fusion.fuse(new_values, cached_values, weight)),
        )
