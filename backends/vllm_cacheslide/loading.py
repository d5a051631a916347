"""Cached keys and values on their way from the page store into a request's slots.

In: one job's plan. Out: layer by layer, the tokens it reuses as they are, keys turned to where they
now stand. Rows that are computed are never loaded, so no write waits for a load.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from cacheslide_agents.errors import NonFiniteError
from cacheslide_agents.pages.base import PageStore, StoredContext, TokenRange
from cacheslide_agents.position.base import Position
from vllm_cacheslide.paging import PagedCache
from vllm_cacheslide.rows import Job


@dataclass(frozen=True)
class _Piece:
    """Tokens `ranges` of one stored context, and the slots and angles they get."""

    source: StoredContext
    ranges: list[TokenRange]
    slots: Tensor
    cos: Tensor
    sin: Tensor


class Load:
    """What one job loads: tokens `wanted` bool [n], as far as its blocks do not hold them."""

    def __init__(
        self, job: Job, wanted: np.ndarray, store: PageStore, position: Position, paged: PagedCache
    ) -> None:
        self._job, self._store, self._position, self._paged = job, store, position, paged
        self._pieces = self._cut(wanted)
        # attention kernels may turn NaN into plausible numbers, so what is loaded is summed up
        self._sum = torch.zeros((), dtype=torch.float32, device=paged.device)

    def __bool__(self) -> bool:
        """Whether there is anything to load."""
        return bool(self._pieces)

    def place(self, layer: int) -> None:
        """Raises `PageError` when the store cannot give a page."""
        started = perf_counter()
        for piece in self._pieces:
            keys, values = (
                part.to(self._paged.device, non_blocking=True)
                for part in self._store.load(piece.source, layer, piece.ranges)
            )
            turned = self._position.rotate(keys.float(), piece.cos, piece.sin).to(keys.dtype)
            self._sum += turned.sum(dtype=torch.float32) + values.sum(dtype=torch.float32)
            self._paged.write(
                layer,
                piece.slots,
                turned.transpose(0, 1).contiguous(),
                values.transpose(0, 1).contiguous(),
            )
        self._job.load_s += perf_counter() - started

    @property
    def needs_ssd(self) -> bool:
        """Whether some page is not in memory."""
        return not all(self._store.in_memory(piece.source) for piece in self._pieces)

    def check(self) -> None:
        """`NonFiniteError` if anything loaded was NaN or infinite."""
        if not torch.isfinite(self._sum):
            raise NonFiniteError("cached keys or values of the reused prompt are not finite")

    def _cut(self, wanted: np.ndarray) -> list[_Piece]:
        """One piece per stored context."""
        plan = self._job.plan
        loaded = wanted.copy()
        loaded[: self._job.start] = False
        by_source: dict[StoredContext, list[np.ndarray]] = {}
        for planned in plan.runs:
            run = planned.run
            rows = run.start + np.flatnonzero(loaded[run.start : run.stop])
            if len(rows):
                pieces = np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1)
                moved = [np.stack((piece, piece - run.shift)) for piece in pieces]
                by_source.setdefault(planned.source, []).extend(moved)
        return [self._piece(source, pieces) for source, pieces in by_source.items()]

    def _piece(self, source: StoredContext, pieces: list[np.ndarray]) -> _Piece:
        """`pieces`: consecutive tokens each, [2, n]: where they stand and where they stood."""
        places = np.concatenate([piece[0] for piece in pieces])
        ranges = [(int(piece[1, 0]), int(piece[1, -1]) + 1) for piece in pieces]
        slots = self._paged.slots(self._job.blocks, places)
        cos, sin = self._position.cos_sin(torch.from_numpy(places).to(self._paged.device))
        return _Piece(source, ranges, slots, cos, sin)
