"""Positional mismatch and key drift: what a shift does to the keys of a chunk that moved.

In: running text of the data folder; a RoPE model, and the same model converted to CoPE. Out:
`curves`, CKSim (mean over heads of the cosine) of a chunk's cached keys with those that a dense run
computes, against how many tokens were put in front of it, mean over tokens, layers and passages.

| curve | cached keys |
| --- | --- |
| `RoPE unrealigned` | as attention saw them when they were cached, rotation and all |
| `RoPE realigned` | turned to where the chunk now stands |
| `CoPE` | of the converted model: keys carry no position |
| `CCPE` | of the converted model, first computed under a profile of other passages |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from cacheslide_agents.backend import Backend
from cacheslide_agents.bench.datasets import texts
from cacheslide_agents.bench.runner import Progress, silent
from cacheslide_agents.bench.studies.curves import Curves
from cacheslide_agents.bench.studies.kept_keys import ck_sim, converted, kept_keys
from cacheslide_agents.chunks import EncodedPrompt, Role, Span
from cacheslide_agents.errors import BackendError, DataError
from cacheslide_agents.policies import CacheSlide
from cacheslide_agents.position.base import Position
from cacheslide_agents.position.profile import Calibrates
from cacheslide_agents.position.rotary import Rotary

SHIFTS = (0, 50, 100, 200, 350, 500, 750, 1000)
HEAD, UPDATE, CHUNK = 32, 64, 128
"""Tokens of the three parts where nothing is shifted yet."""
CALIBRATED = 4
"""Passages that the profile is learnt from, at shifts spread evenly over the range."""


@runtime_checkable
class Placed(Protocol):
    """A backend that tells where its keys stand."""

    @property
    def position(self) -> Position: ...


@dataclass(frozen=True)
class Passage:
    """Consecutive tokens; the update in front of the chunk grows towards the head."""

    ids: tuple[int, ...]

    def prompt(self, shift: int) -> EncodedPrompt:
        """HEAD tokens | UPDATE + `shift` tokens | CHUNK tokens | one more."""
        parts = {
            "head": (Role.REUSE, self.ids[:HEAD]),
            "update": (Role.RECOMPUTE, self.ids[-1 - CHUNK - UPDATE - shift : -1 - CHUNK]),
            "chunk": (Role.REUSE, self.ids[-1 - CHUNK : -1]),
            "cue": (Role.RECOMPUTE, self.ids[-1:]),
        }
        ids: list[int] = []
        spans = []
        for name, (role, part) in parts.items():
            spans.append(Span(name, role, len(ids), len(ids) + len(part), f"{name}-{shift}"))
            ids += part
        return EncodedPrompt(tuple(ids), tuple(spans), "", "pmkd")

    def keys(self, backend: Backend, shift: int, policy: CacheSlide | None = None) -> list[Tensor]:
        """Those of the chunk, layer by layer."""
        start = HEAD + UPDATE + shift
        return kept_keys(backend, self.prompt(shift), [(start, start + CHUNK)], policy)


def run(
    backend: Backend,
    data: Path,
    *,
    save: Callable[[Mapping[str, Any]], None],
    progress: Progress = silent,
    cope_model: str | None = None,
    shifts: Sequence[int] = SHIFTS,
    limit: int = 2,
    seed: int = 0,
    max_prompt_tokens: int = 4096,
) -> dict[str, Any]:
    """`limit` passages; `cope_model` is `<model>-cope` unless named."""
    if not isinstance(backend, Placed) or not isinstance(backend.position, Rotary):
        raise BackendError(f"this study starts from a RoPE model, which {backend.model_id} is not")
    started = perf_counter()
    fixed = HEAD + UPDATE + CHUNK + 1
    longest = min(max_prompt_tokens, backend.max_model_len)
    shifts = [each for each in sorted(shifts) if fixed + each <= longest]
    if not shifts:
        raise DataError(
            f"a passage takes {fixed} tokens, more than the {longest} allowed; raise "
            "--max-prompt-tokens, or choose a model with a longer window"
        )
    name = cope_model or f"{backend.model_id}-cope"
    with converted(backend, name) as cope:
        curves = Curves(
            started,
            "shift, tokens",
            "CKSim of cached with dense keys",
            model=backend.model_id,
            cope_model=cope.model_id,
        )
        found = _passages(backend, data, CALIBRATED + limit, fixed + shifts[-1], seed)
        measured, others = found[:limit], found[limit:]
        for number, passage in enumerate(measured, start=1):
            _rope(backend, backend.position, passage, shifts, curves)
            save(curves.to_dict())
            progress(number, 2 * limit, f"{backend.model_id}: passage {number}")
        _calibrate(cope, others, shifts)
        for number, passage in enumerate(measured, start=1):
            _cope(cope, passage, shifts, curves)
            save(curves.to_dict())
            progress(limit + number, 2 * limit, f"{cope.model_id}: passage {number}")
        return curves.to_dict()


def _rope(
    backend: Backend,
    position: Position,
    passage: Passage,
    shifts: Sequence[int],
    curves: Curves,
) -> None:
    cached = passage.keys(backend, 0)
    then = _turned(position, cached, 0)
    for shift in shifts:
        dense = passage.keys(backend, shift)
        now = _turned(position, dense, shift)
        _note(curves, "RoPE unrealigned", shift, then, now)
        _note(curves, "RoPE realigned", shift, _turned(position, cached, shift), now)


def _cope(
    cope: Backend,
    passage: Passage,
    shifts: Sequence[int],
    curves: Curves,
) -> None:
    cached = passage.keys(cope, 0)
    canonical = passage.keys(cope, 0, CacheSlide())
    for shift in shifts:
        dense = passage.keys(cope, shift)
        _note(curves, "CoPE", shift, cached, dense)
        _note(curves, "CCPE", shift, canonical, dense)


def _calibrate(cope: Backend, passages: Sequence[Passage], shifts: Sequence[int]) -> None:
    if not isinstance(cope, Calibrates):
        raise BackendError(f"{cope.model_id} cannot learn a CCPE profile")
    spread = np.linspace(0, shifts[-1], len(passages)).astype(int)
    prompts = [one.prompt(int(shift)) for one, shift in zip(passages, spread, strict=True)]
    cope.add_profile(cope.calibrate(prompts))


def _turned(position: Position, layers: Sequence[Tensor], shift: int) -> list[Tensor]:
    """Keys of the chunk where it stands behind `shift` tokens more."""
    cos, sin = position.cos_sin(HEAD + UPDATE + shift + np.arange(CHUNK))
    return [position.rotate(keys, cos, sin) for keys in layers]


def _note(
    curves: Curves,
    curve: str,
    shift: int,
    cached: Sequence[Tensor],
    dense: Sequence[Tensor],
) -> None:
    layers = [float(ck_sim(*pair).mean()) for pair in zip(cached, dense, strict=True)]
    curves.note(curve, shift, float(np.mean(layers)))


def _passages(backend: Backend, data: Path, count: int, length: int, seed: int) -> list[Passage]:
    """`count` pieces of the text data, `length` tokens each, one after the other."""
    path = data / "text" / "valid.jsonl"
    material = "\n\n".join(texts(path))[seed * 9973 :]
    ids = _tokens(backend, material[: count * length * 8])
    if len(ids) < count * length:
        raise DataError(
            f"{path} ends before {count} passages of {length} tokens are full; give more text, or "
            "lower --limit or --max-prompt-tokens"
        )
    return [Passage(tuple(ids[n * length : (n + 1) * length])) for n in range(count)]


def _tokens(backend: Backend, text: str) -> list[int]:
    found: list[int] = backend.tokenizer(text, add_special_tokens=False)["input_ids"]
    return found
