"""Curves of a study: what they hold, and the studies that draw them over changed turns.

In: figures (curve, x, value) as they are measured. Out: `curves`, at every x the mean of its
figures, and what the axes are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from statistics import fmean
from time import perf_counter
from typing import Any

from cacheslide_agents.backend import Backend
from cacheslide_agents.bench.runner import Progress
from cacheslide_agents.bench.studies.kept_keys import converted
from cacheslide_agents.bench.task_data import Pair
from cacheslide_agents.chunks import EncodedPrompt

Figure = tuple[str, int, float]


class Curves:
    """`about` is what else the study's JSON says; `x` and `y` name the axes; `started` is when the
    study began, by `perf_counter`."""

    def __init__(self, started: float, x: str, y: str, **about: Any) -> None:
        self._head = {**about, "x": x, "y": y}
        self._figures: dict[str, dict[int, list[float]]] = {}
        self._started = started

    def note(self, curve: str, x: int, value: float) -> None:
        self._figures.setdefault(curve, {}).setdefault(x, []).append(value)

    def to_dict(self) -> dict[str, Any]:
        return {
            **self._head,
            "seconds": round(perf_counter() - self._started, 1),
            "curves": {
                name: [[x, fmean(found)] for x, found in curve.items()]
                for name, curve in self._figures.items()
            },
        }


def draw(
    backend: Backend,
    cope_model: str | None,
    pairs: Sequence[Pair],
    measure: Callable[[Backend, EncodedPrompt, EncodedPrompt], Iterable[Figure]],
    *,
    started: float,
    x: str,
    y: str,
    save: Callable[[Mapping[str, Any]], None],
    progress: Progress,
) -> dict[str, Any]:
    """The figures of every pair, with `cope_model` also those of the converted model."""
    models = [backend.model_id]
    curves = Curves(started, x, y, models=models)
    with ExitStack() as stack:
        measured = [("", backend)]
        if cope_model is not None:
            measured.append(("CoPE: ", stack.enter_context(converted(backend, cope_model))))
            models.append(measured[-1][1].model_id)
        for name, model in measured:
            for number, (old, new) in enumerate(pairs, start=1):
                for curve, place, value in measure(model, old, new):
                    curves.note(name + curve, place, value)
                save(curves.to_dict())
                progress(number, len(pairs), f"{model.model_id}: turn {number}")
    return curves.to_dict()
