"""CCPE: how much an update usually adds to the positions that a chunk behind it sees.

In: for each pair of a reused chunk and an update before it, a histogram per layer and query head;
or the file they were kept in. Out: the canonical masses of a prompt's rows, for
`contextual_attention`.

CCPE is Algorithm 1 of CacheSlide (FAST 2026). There a chunk's canonical encoding is one whole
matrix of positions; here it is one number per layer, head, chunk and update: docs/positions.md.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, runtime_checkable
from urllib.parse import quote

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cacheslide_agents.chunks import EncodedPrompt, Role, Span, not_unicode
from cacheslide_agents.errors import DataError, ModelLoadError
from cacheslide_agents.position.contextual import CanonicalMass
from cacheslide_agents.weights.writing import save_tensors, writing

FORMAT = "cacheslide-ccpe-1"
_DAMAGED = (OSError, SafetensorError, KeyError, RecursionError, TypeError, ValueError)
SUFFIX = ".ccpe.safetensors"
_MEND = "free some space there, choose another folder, or give the task a shorter name"


def bin_of(mass: Tensor, npos: int) -> Tensor:
    """The bin each mass falls into, int64: the nearest whole number, at most npos - 1.

    Bins are 1 wide and centred on whole numbers, so that a bin's number is what its masses are
    about. The last one takes everything from there on: positions saturate there.
    """
    return mass.round().clamp(max=npos - 1).long()


@dataclass(frozen=True, eq=False)
class CanonicalEntry:
    """What `update` usually adds to positions seen from the rows of `chunk`, by their ids.

    `mass` int16 [layers, heads] is the most frequent bin, `share` float32 [layers, heads] the part
    of the rows that fell into it. Counted over `rows` rows of `prompts` prompts.
    """

    chunk: str
    update: str
    prompts: int
    rows: int
    mass: Tensor
    share: Tensor

    @classmethod
    def of(cls, chunk: str, update: str, prompts: int, histogram: Tensor) -> CanonicalEntry:
        """From counts [layers, heads, npos]; of bins as frequent, the lowest."""
        count, mass = histogram.max(dim=-1)
        rows = histogram.sum(dim=-1)
        share = (count / rows).float()
        return cls(chunk, update, prompts, int(rows[0, 0]), mass.to(torch.int16), share)


@dataclass(frozen=True, eq=False)
class CanonicalRows:
    """Rows of one prompt that count updates at their canonical masses, each [layers, heads]."""

    masses: tuple[CanonicalMass, ...]

    @property
    def first(self) -> int:
        """The first of these rows."""
        return min(each.first_row for each in self.masses)

    @property
    def tokens(self) -> int:
        """How many rows they are."""
        return sum(stop - start for start, stop in {(m.first_row, m.last_row) for m in self.masses})

    def of(self, layer: int) -> tuple[CanonicalMass, ...]:
        return tuple(replace(each, mass=each.mass[layer]) for each in self.masses)


@dataclass(frozen=True, eq=False)
class Profile:
    """The canonical masses of one task, for one model with `npos` positions per head.

    `model` is the digest of the model's weights and config, the same in every precision.
    """

    task: str
    model: str
    npos: int
    entries: tuple[CanonicalEntry, ...]

    def place(
        self, spans: Sequence[Span], fresh: npt.NDArray[np.bool_], device: torch.device
    ) -> CanonicalRows | None:
        """What holds in the prompt of `spans`, whose rows `fresh` [n] are computed for the first
        time; `None` if no such row of a reuse chunk stands behind an update that is known."""
        known = {(each.chunk, each.update): each.mass for each in self.entries}
        masses = [
            CanonicalMass(update.start, update.stop, first, last, mass.to(device, torch.float32))
            for chunk, update in chunks_behind_updates(spans)
            if (mass := known.get((chunk.id, update.id))) is not None
            for first, last in _intervals(fresh, chunk.start, chunk.stop)
        ]
        return CanonicalRows(tuple(masses)) if masses else None

    def check(self, model: str, layers: int, heads: int, npos: int) -> None:
        """`ModelLoadError` unless it was calibrated on the model with this digest and shape."""
        fits = all(each.mass.shape == (layers, heads) for each in self.entries)
        if model != self.model or npos != self.npos or not fits:
            raise ModelLoadError(
                f"the CCPE profile of task {self.task!r} was calibrated on another model; make one "
                "for this model with `cacheslide calibrate`"
            )

    def save(self, folder: Path) -> Path:
        """Write it into `folder`, under the task's name; an older one there is replaced.

        Raises `DataError` as `check_place` does, and when the disk is full.
        """
        path = check_place(folder, self.task)
        tensors = {}
        for number, each in enumerate(self.entries):
            tensors[f"{number}.mass"] = each.mass.cpu().contiguous()
            tensors[f"{number}.share"] = each.share.cpu().contiguous()
        head = {"format": FORMAT, "task": self.task, "model": self.model, "npos": str(self.npos)}
        listed = [
            {name: getattr(each, name) for name in ("chunk", "update", "prompts", "rows")}
            for each in self.entries
        ]
        save_tensors(tensors, _draft(path), _MEND, {**head, "entries": json.dumps(listed)})
        with writing(path, _MEND):
            _draft(path).replace(path)
        return path

    @classmethod
    def read(cls, path: Path) -> Profile:
        """`DataError` for a file that is missing, damaged, or no profile."""
        try:
            with safe_open(path, "pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            if metadata.get("format") != FORMAT:
                raise ValueError(f"its format is {metadata.get('format')!r}, not {FORMAT!r}")
            return _profile(metadata, tensors)
        except _DAMAGED as error:
            raise DataError(
                f"{path} is no CCPE profile ({error}); make one with `cacheslide calibrate`"
            ) from error


def check_place(folder: Path, task: str) -> Path:
    """The file in `folder` for the profile of `task`; `DataError` where it cannot be written."""
    if wrong := not_unicode(task):
        raise DataError(f"the task {task!r} names its profile's file, but {wrong}")
    path = folder / f"{quote(task, safe='')}{SUFFIX}"
    with writing(path, _MEND):
        folder.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError("a folder has this name")
        _draft(path).touch()
        _draft(path).unlink()
    return path


def _draft(path: Path) -> Path:
    """Nobody's profile until it is renamed."""
    return path.with_name(f".{path.name}.tmp")


@runtime_checkable
class Calibrates(Protocol):
    """A backend that learns profiles and uses them. `profiled`: the tasks it has profiles of."""

    @property
    def profiled(self) -> Collection[str]: ...

    def calibrate(
        self, prompts: Iterable[EncodedPrompt], seen: Callable[[int], None] | None = None
    ) -> Profile:
        """The profile of one task; `seen` is told how many prompts are done."""
        ...

    def add_profile(self, profile: Profile) -> None: ...


def chunks_behind_updates(spans: Sequence[Span]) -> Iterator[tuple[Span, Span]]:
    """Every pair (reuse chunk, recompute chunk before it) of a prompt; empty ones have no pair."""
    updates: list[Span] = []
    for span in spans:
        if len(span) and span.role is Role.RECOMPUTE:
            updates.append(span)
        elif len(span):
            yield from ((span, update) for update in updates)


def _profile(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> Profile:
    """`ValueError` and the like where the parts do not fit each other."""
    npos = int(metadata["npos"])
    entries = tuple(
        CanonicalEntry(**fields, mass=tensors[f"{number}.mass"], share=tensors[f"{number}.share"])
        for number, fields in enumerate(json.loads(metadata["entries"]))
    )
    pairs = {(each.chunk, each.update) for each in entries}
    if not entries or len(pairs) != len(entries):
        raise ValueError("it has no entries, or two of one chunk and update")
    for each in entries:
        if each.mass.dtype != torch.int16 or each.mass.dim() != 2 or not each.mass.numel():
            raise ValueError("masses must be int16 [layers, heads]")
        if each.share.shape != each.mass.shape or not bool(torch.isfinite(each.share).all()):
            raise ValueError("shares must be finite numbers [layers, heads]")
        if int(each.mass.min()) < 0 or int(each.mass.max()) >= npos:
            raise ValueError(f"masses must be 0 to {npos - 1}")
    return Profile(metadata["task"], metadata["model"], npos, entries)


def _intervals(mask: npt.NDArray[np.bool_], start: int, stop: int) -> list[tuple[int, int]]:
    """Maximal ranges inside [start, stop) where `mask` holds."""
    edges = np.flatnonzero(np.diff(np.pad(mask[start:stop].astype(np.int8), 1)))
    return [(start + int(a), start + int(b)) for a, b in edges.reshape(-1, 2)]
