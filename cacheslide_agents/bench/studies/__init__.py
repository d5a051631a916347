"""Studies: one question each, answered by one JSON file.

In: a study's name, the data folder, a backend. Out: `{"schema": 1, "study": name, ...}`, rewritten
after every step so that a killed run keeps what it has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

from cacheslide_agents.backend import Backend
from cacheslide_agents.bench.results import SCHEMA, read_json, write_json
from cacheslide_agents.bench.runner import Progress, silent
from cacheslide_agents.errors import DataError, RequestError

__all__ = ["STUDIES", "run_study", "takes"]

Study = Callable[..., Mapping[str, Any]]
STUDIES = (
    "answers",
    "converted",
    "decoupling",
    "drift",
    "episodes",
    "frontier",
    "layers",
    "length",
    "padding",
    "pmkd",
    "pressure",
    "ssd",
    "stale",
    "throughput",
)
"""Modules beside this one; each is imported when it is run, since what it measures is heavy."""


def run_study(
    name: str,
    *,
    data: str | Path,
    backend: Backend,
    out: str | Path | None = None,
    progress: Progress = silent,
    resume: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Run study `name`; `options` are keyword arguments of its `run` (see the study's module).

    With `resume` a study that takes an `earlier` run gets what is in `out`; another refuses.
    """
    run = _run(name)
    if resume:
        options["earlier"] = _earlier(name, out)

    def save(found: Mapping[str, Any]) -> None:
        if out is not None:
            write_json(out, {"schema": SCHEMA, "study": name, **found})

    found = run(backend, Path(data), save=save, progress=progress, **options)
    save(found)
    return {"schema": SCHEMA, "study": name, **found}


def takes(name: str, option: str) -> bool:
    """Whether study `name` has an option of that name."""
    return option in signature(_run(name)).parameters


def _run(name: str) -> Study:
    if name not in STUDIES:
        raise DataError(f"no study named {name!r}; known: {', '.join(STUDIES)}")
    run: Study = import_module(f"{__name__}.{name}").run
    return run


def _earlier(name: str, out: str | Path | None) -> dict[str, Any] | None:
    """What an interrupted run left in `out`, if there was one."""
    if not takes(name, "earlier"):
        raise RequestError(f"study {name!r} cannot be resumed; leave out --resume")
    if out is None or not Path(out).exists():
        return None
    found = read_json(out)
    if (found.get("schema"), found.get("study")) != (SCHEMA, name):
        raise DataError(f"cannot resume: {out} is no {name!r} study of schema {SCHEMA}")
    return found
