"""How a context comes into a store.

In: a context, its layers, what it reused. Out: an entry in the catalog whose rows are in memory, or
a refusal that changed nothing but what had to go anyway. Callers hold the store's lock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from cacheslide_agents.errors import PageError
from cacheslide_agents.pages.base import LayerKV, ReusedRun, StoredContext
from cacheslide_agents.pages.block import Block
from cacheslide_agents.pages.draft import Draft, Ints, draft
from cacheslide_agents.pages.entry import Entry
from cacheslide_agents.pages.geometry import Geometry
from cacheslide_agents.pages.holdings import Holdings
from cacheslide_agents.pages.lease import Lease
from cacheslide_agents.pages.reader import Reader
from cacheslide_agents.pages.room import Room


@dataclass(frozen=True)
class Offer:
    """What a caller of `put` brought."""

    context: StoredContext
    layers: Sequence[LayerKV]
    residuals: Mapping[int, Tensor]
    reused: Sequence[ReusedRun]
    lease: Lease | None


class Keeper:
    def __init__(self, holdings: Holdings, room: Room, reader: Reader) -> None:
        self._holdings, self._room, self._reader = holdings, room, reader

    def keep(self, offer: Offer) -> Entry | None:
        """`None` when there is nothing in it, a source is gone, or there is no room."""
        if not offer.layers or len(offer.context) == 0 or offer.layers[0][0].numel() == 0:
            return None
        geometry = Geometry.of(offer.layers, len(offer.context))
        _check_residuals(offer)
        sources = [self._holdings.catalog.get(run.source) for run in offer.reused]
        runs = [(s, run) for s, run in zip(sources, offer.reused, strict=True) if s is not None]
        if len(runs) < len(sources):
            return None
        going = [
            entry
            for entry in self._holdings.catalog.superseded_by(offer.context)
            if _readers(entry, offer.lease) == 0
        ]
        plan = draft(
            offer.context,
            geometry,
            {layer: states.detach().clone() for layer, states in offer.residuals.items()},
            runs,
            lambda block: _is_ours(block, going, offer.lease),
        )
        over = self._holdings.catalog.over_quota(plan.entry, going)
        if over is None:
            return None
        layers = self._filled(offer, runs) if plan.anew else offer.layers
        return self._take_in(offer, plan, layers, going, over)

    def _take_in(
        self,
        offer: Offer,
        plan: Draft,
        layers: Sequence[LayerKV],
        going: list[Entry],
        over: list[Entry],
    ) -> Entry | None:
        """From here on what the new entry shares lives, and what it corrects stays in place.

        Other threads run while room is waited for: if one began to read what was to go, all is
        planned anew.
        """
        entry, holdings = plan.entry, self._holdings
        in_place = {entry.blocks[at] for at in np.unique(entry.block_of[plan.corrected])}
        entry.own()
        holdings.hold(in_place)
        nbytes = sum(b.geometry.block_bytes for b in plan.new_blocks) + entry.residual_bytes
        leaving = [*going, *over]
        dying = {b for e in leaving for b in e.blocks if b.owners <= {*leaving}}
        room = stored = False
        try:
            room = self._room.make(nbytes, exempt=dying, going=leaving)
            if room and self._are_free(offer, in_place, going, over):
                self._replace(entry, going, over)
                for block in plan.new_blocks:
                    holdings.host.take(block)
                self._fill(plan, layers)
                holdings.add(entry)
                stored = True
        finally:
            if not stored:
                holdings.abandon(entry)
            holdings.unhold(in_place)
        if stored:
            return entry
        return self.keep(offer) if room else None

    def _are_free(
        self, offer: Offer, in_place: set[Block], going: list[Entry], over: list[Entry]
    ) -> bool:
        """Whether nobody else reads what is about to be corrected or dropped."""
        return (
            all(block.busy == 1 for block in in_place)
            and all(_readers(entry, offer.lease) == 0 for entry in going)
            and not any(self._holdings.catalog.is_held(entry) for entry in over)
        )

    def _replace(self, entry: Entry, going: list[Entry], over: list[Entry]) -> None:
        """Another thread may have dropped some while this one waited for room."""
        for reason, leaving, heir in (("superseded", going, entry), ("evictions", over, None)):
            for old in leaving:
                if self._holdings.catalog.get(old.context) is old:
                    self._holdings.drop(old, reason, heir)

    def _fill(self, plan: Draft, layers: Sequence[LayerKV]) -> None:
        entry, counts = plan.entry, self._holdings.counts
        tokens = np.union1d(plan.fresh, plan.corrected)
        whole = len(tokens) == len(entry.context)
        places = np.array([-1 if b.slot is None else b.slot for b in entry.blocks])
        slots, rows = places[entry.block_of[tokens]], entry.row_of[tokens]
        arena = self._holdings.host.arena(entry.geometry)
        for layer, (keys, values) in enumerate(layers if len(tokens) else ()):
            pair = (keys, values) if whole else (keys[:, tokens], values[:, tokens])
            arena.write(slots, rows, layer, pair)
        for token in plan.corrected:
            block = entry.blocks[entry.block_of[token]]
            block.corrected |= 1 << int(entry.row_of[token])
        written = len(tokens) * entry.geometry.token_bytes
        counts["memory_write_bytes"] += written
        counts["dirtied_bytes"] += written
        counts["puts"] += 1

    def _filled(self, offer: Offer, runs: Sequence[tuple[Entry, ReusedRun]]) -> list[LayerKV]:
        """The layers with the reused rows in them, read from their sources."""
        filled: list[LayerKV] = []
        for layer, (keys, values) in enumerate(offer.layers):
            keys, values = keys.detach().to("cpu", copy=True), values.detach().to("cpu", copy=True)
            for source, run in runs:
                kept = np.flatnonzero(~run.corrected)
                old = self._read(source, layer, kept + run.cached_start)
                keys[:, kept + run.start], values[:, kept + run.start] = old
            filled.append((keys, values))
        return filled

    def _read(self, source: Entry, layer: int, tokens: Ints) -> LayerKV:
        ranges = [(int(token), int(token) + 1) for token in tokens]
        reading = self._reader.begin(source, layer, ranges)
        sound = False
        try:
            pair = self._reader.read(reading)
            sound = True
        except PageError as error:
            self._holdings.lose(reading.blocks, error)
            raise
        finally:
            self._reader.end(reading, sound=sound)
        return pair


def _readers(entry: Entry, lease: Lease | None) -> int:
    """Leases on `entry` but the caller's own."""
    own = lease.contexts.count(entry.context) if lease is not None else 0
    return entry.leases - own


def _is_ours(block: Block, going: Sequence[Entry], lease: Lease | None) -> bool:
    """Whether nobody but contexts that go needs `block`, and it can be written to now."""
    return (
        block.whole
        and not block.busy
        and all(owner in going and _readers(owner, lease) == 0 for owner in block.owners)
    )


def _check_residuals(offer: Offer) -> None:
    tokens = len(offer.context)
    for layer, states in offer.residuals.items():
        if states.dim() != 2 or states.shape[0] > tokens:
            raise PageError(
                f"residuals of layer {layer} are {list(states.shape)}; "
                f"a context of {tokens} tokens has at most [{tokens}, hidden]"
            )
