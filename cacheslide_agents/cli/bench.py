"""`cacheslide bench`: a workload or a study, measured.

In: a task or a study, data, a model. Out: JSON in --out or on stdout; a table for people.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import TaskProgressColumn

from cacheslide_agents.cli import options
from cacheslide_agents.cli.console import bar, emit, notes, screen
from cacheslide_agents.cli.engine import BackendOptions, with_backend
from cacheslide_agents.errors import RequestError


@with_backend
def bench(
    *,
    data: Annotated[Path, typer.Option(help="Folder with hotpotqa/, msc/, swe_agent/, text/.")],
    task: Annotated[
        str | None, typer.Option(help="reflexion, memgpt, swe_agent or append.")
    ] = None,
    study: Annotated[str | None, typer.Option(help="A study by name, e.g. frontier.")] = None,
    backend: BackendOptions,
    cope_model: Annotated[
        str | None, typer.Option(help="Converted model that some studies compare with.")
    ] = None,
    policies: Annotated[str | None, typer.Option(help="Names with commas; default: all.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Turns at most.")] = None,
    seed: Annotated[int, typer.Option(help="Chooses the turns.")] = 0,
    max_prompt_tokens: Annotated[int, typer.Option(min=1)] = 4096,
    answers: Annotated[
        bool, typer.Option(help="Also answer under every policy, for F1 and EM.")
    ] = True,
    repeats: Annotated[int, typer.Option(min=1, help="Timed answers per policy.")] = 1,
    resume: Annotated[bool, typer.Option("--resume", help="Keep what --out has.")] = False,
    out: options.Out = None,
    as_json: options.Json = False,
) -> None:
    """Measure reuse policies on agent turns against dense prefill."""
    if (task is None) == (study is None):
        raise RequestError("give either --task or --study")
    _known(task, study, policies, cope_model)
    given: dict[str, Any] = {
        "data": data,
        "out": out,
        "seed": seed,
        "max_prompt_tokens": max_prompt_tokens,
        "resume": resume,
    }
    chosen = {"limit": limit, "cope_model": cope_model}
    given |= {name: value for name, value in chosen.items() if value is not None}
    with backend.opened() as loaded, progress(shown=not as_json) as shown:
        given |= {"backend": loaded, "progress": shown}
        if study is not None:
            _study(study, given, as_json=as_json)
            return
        assert task is not None
        given |= {"backend_name": backend.name, "repeats": repeats, "answers": answers}
        if policies is not None:
            given["policies"] = policies.split(",")
        _task(task, given, as_json=as_json)


def _known(
    task: str | None, study: str | None, policies: str | None, cope_model: str | None
) -> None:
    """Names are checked before a model is loaded."""
    from cacheslide_agents.bench import STUDIES, TASKS
    from cacheslide_agents.bench.studies import takes
    from cacheslide_agents.policies import named

    for kind, name, known in (("task", task, TASKS), ("study", study, STUDIES)):
        if name is not None and name not in known:
            raise RequestError(f"no {kind} is named {name!r}; known: {', '.join(known)}")
    if study is not None and policies is not None:
        raise RequestError("--policies goes with --task; a study chooses its own")
    if cope_model is not None:
        pairs = [name for name in STUDIES if takes(name, "cope_model")]
        if study not in pairs:
            raise RequestError(f"--cope-model goes with --study {', '.join(pairs)}")
    for name in policies.split(",") if policies else ():
        named(name)


def _task(name: str, arguments: dict[str, Any], *, as_json: bool) -> None:
    from cacheslide_agents.bench import run_task, table

    results = run_task(name, **arguments)
    if as_json:
        emit(results.to_dict())
    else:
        screen().print(table(results))


def _study(name: str, arguments: dict[str, Any], *, as_json: bool) -> None:
    from cacheslide_agents.bench import run_study
    from cacheslide_agents.bench.study_reports import FLAT, STUDY_REPORTS

    found = run_study(name, **arguments)
    if as_json or arguments["out"] is None:
        emit(found)
    else:
        shown = STUDY_REPORTS.get(name, FLAT)
        if not shown.is_flat:
            screen().print(shown.table(found))
        notes().print(f"written to {arguments['out']}")


@contextmanager
def progress(*, shown: bool) -> Iterator[Callable[[int, int, str], None]]:
    """A bar for what is done of how much, and what that is."""
    with bar("starting", TaskProgressColumn(), shown=shown) as update:
        yield lambda done, total, label: update(completed=done, total=total, description=label)
