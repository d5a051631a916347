"""Studies: one question each, answered by one JSON file.

In: a study's name, the data folder, a backend. Out: `{"schema": 1, "study": name, ...}`, rewritten
after every step so that a killed run keeps what it has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cacheslide_agents.backend import Backend
from cacheslide_agents.bench.results import SCHEMA, write_json
from cacheslide_agents.bench.runner import Progress, silent
from cacheslide_agents.bench.studies import frontier, length
from cacheslide_agents.errors import DataError

__all__ = ["STUDIES", "run_study"]

Study = Callable[..., Mapping[str, Any]]
STUDIES: Mapping[str, Study] = {"frontier": frontier.run, "length": length.run}


def run_study(
    name: str,
    *,
    data: str | Path,
    backend: Backend,
    out: str | Path | None = None,
    progress: Progress = silent,
    **options: Any,
) -> dict[str, Any]:
    """Run study `name`; `options` are keyword arguments of its `run` (see the study's module)."""
    if name not in STUDIES:
        raise DataError(f"no study named {name!r}; known: {', '.join(STUDIES)}")

    def save(found: Mapping[str, Any]) -> None:
        if out is not None:
            write_json(out, {"schema": SCHEMA, "study": name, **found})

    found = STUDIES[name](backend, Path(data), save=save, progress=progress, **options)
    save(found)
    return {"schema": SCHEMA, "study": name, **found}
