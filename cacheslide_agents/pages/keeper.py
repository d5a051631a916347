"""How a context comes into a store.

In: a context, its layers, what it reused. Out: an entry in the catalog whose rows are in memory, or
a refusal that changed nothing but what had to go anyway. Callers hold the store's lock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from cacheslide_agents.errors import PageError
from cacheslide_agents.pages.base import LayerKV, ReusedRun, StoredContext
from cacheslide_agents.pages.block import Block
from cacheslide_agents.pages.draft import Draft, draft
from cacheslide_agents.pages.entry import Entry
from cacheslide_agents.pages.geometry import Geometry
from cacheslide_agents.pages.holdings import Holdings
from cacheslide_agents.pages.lease import Lease
from cacheslide_agents.pages.reader import Reader
from cacheslide_agents.pages.room import Room

TRIES = 4
"""Plans for one context, each made because another thread crossed the one before."""


@dataclass(frozen=True)
class Offer:
    """What a caller of `put` brought."""

    context: StoredContext
    layers: Sequence[LayerKV]
    residuals: Mapping[int, Tensor]
    reused: Sequence[ReusedRun]
    lease: Lease | None


@dataclass(frozen=True)
class Intake:
    """A draft and what makes way for it: `going` are superseded, `over` are beyond a quota."""

    plan: Draft
    going: list[Entry]
    over: list[Entry]

    @property
    def leaving(self) -> list[Entry]:
        return [*self.going, *self.over]


class CrossedError(Exception):
    """What others did while room was waited for does not go with the plan."""


class Keeper:
    def __init__(self, holdings: Holdings, room: Room, reader: Reader) -> None:
        self._holdings, self._room, self._reader = holdings, room, reader

    def keep(self, offer: Offer) -> Entry | None:
        """`None` when there is nothing in it, a source is gone, there is no room, or others cross
        every plan.
        """
        if not offer.layers or len(offer.context) == 0 or offer.layers[0][0].numel() == 0:
            return None
        geometry = Geometry.of(offer.layers, len(offer.context))
        _check_residuals(offer)
        for _ in range(TRIES):
            with suppress(CrossedError):
                return self._planned_and_taken(offer, geometry)
        return None

    def _planned_and_taken(self, offer: Offer, geometry: Geometry) -> Entry | None:
        sources = [self._holdings.catalog.get(run.source) for run in offer.reused]
        runs = [(s, run) for s, run in zip(sources, offer.reused, strict=True) if s is not None]
        if len(runs) < len(sources):
            return None
        going = self._superseded(offer)
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
        return self._take_in(offer, Intake(plan, going, over), layers)

    def _superseded(self, offer: Offer) -> list[Entry]:
        """Those that nobody else reads."""
        superseded = self._holdings.catalog.superseded_by(offer.context)
        return [entry for entry in superseded if _readers(entry, offer.lease) == 0]

    def _take_in(self, offer: Offer, intake: Intake, layers: Sequence[LayerKV]) -> Entry | None:
        """From here on what the new entry shares lives, and what it corrects stays in place.

        Other threads run while room is waited for, and may cross the plan.
        """
        plan, holdings = intake.plan, self._holdings
        entry = plan.entry
        in_place = {entry.blocks[at] for at in np.unique(entry.block_of[plan.corrected])}
        entry.own()
        holdings.hold(in_place)
        nbytes = sum(b.geometry.block_bytes for b in plan.new_blocks) + entry.residual_bytes
        leaving = {*intake.leaving}
        dying = {b for e in leaving for b in e.blocks if b.owners <= leaving}
        stored = False
        try:
            if self._room.make(nbytes, exempt=dying, going=leaving):
                if any(block.busy > 1 for block in in_place) or self._is_crossed(offer, intake):
                    raise CrossedError
                self._replace(intake)
                for block in plan.new_blocks:
                    holdings.host.take(block)
                self._fill(plan, layers)
                holdings.add(entry)
                stored = True
        finally:
            if not stored:
                holdings.abandon(entry)
            holdings.unhold(in_place)
        return entry if stored else None

    def _is_crossed(self, offer: Offer, intake: Intake) -> bool:
        """Whether others began to use what has to go, or stored what has to go as well."""
        catalog = self._holdings.catalog
        going = self._superseded(offer)
        over = catalog.over_quota(intake.plan.entry, going)
        return (
            any(_readers(entry, offer.lease) > 0 for entry in intake.going)
            or any(catalog.is_held(entry) for entry in intake.over)
            or not {*going} <= {*intake.going}
            or over is None
            or not {*over} <= {*intake.leaving}
        )

    def _replace(self, intake: Intake) -> None:
        """Another thread may have dropped some while this one waited for room."""
        leaving = (
            ("superseded", intake.going, intake.plan.entry),
            ("evictions", intake.over, None),
        )
        for reason, entries, heir in leaving:
            for old in entries:
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
                reading = self._reader.begin(source, layer, kept + run.cached_start, promote=False)
                old = self._reader.finish(reading)
                keys[:, kept + run.start], values[:, kept + run.start] = old
            filled.append((keys, values))
        return filled


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
