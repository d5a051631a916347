"""`cacheslide calibrate`: CCPE profiles, learnt from the prompts of a task.

In: a log of requests, or a workload by name; a CoPE model. Out: one file for every task; what they
hold on stdout.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import MofNCompleteColumn
from rich.table import Table

from cacheslide_agents.cli import options
from cacheslide_agents.cli.console import bar, emit, notes, screen, waiting
from cacheslide_agents.cli.engine import BackendOptions, with_cope_backend
from cacheslide_agents.cli.requests import Source, with_source
from cacheslide_agents.errors import DataError, RequestError

if TYPE_CHECKING:
    from cacheslide_agents.chunks import EncodedPrompt
    from cacheslide_agents.position.profile import Calibrates, CanonicalEntry, Profile
    from cacheslide_agents.prompt.chat import ChatEncoder
    from cacheslide_agents.prompt.logged import LoggedRequest

MOST = 1_000_000


@with_source
@with_cope_backend
def calibrate(
    *,
    source: Source,
    out: Annotated[
        Path, typer.Option(parser=options.place("--out"), help="Folder for the profiles.")
    ] = Path("profiles"),
    prompts: Annotated[int, typer.Option(min=1, max=MOST, help="Prompts at most.")] = 32,
    skip: Annotated[
        int,
        typer.Option(
            min=0, max=MOST, help="Leave out the first: 2 for each turn that a bench measures."
        ),
    ] = 0,
    max_prompt_tokens: Annotated[int, typer.Option(min=1, help="Longer ones are left out.")] = 4096,
    backend: BackendOptions,
    as_json: options.Json = False,
) -> None:
    """Learn where the chunks of a task usually stand (CCPE), for a CoPE model."""
    from cacheslide_agents.bench.runner import token_limits
    from cacheslide_agents.position.profile import Calibrates, check_place
    from cacheslide_agents.prompt.chat import ChatEncoder
    from cacheslide_agents.training.output import claimed

    with backend.opened() as loaded:
        if not isinstance(loaded, Calibrates):
            raise RequestError(f"backend {backend.name!r} cannot calibrate; use --backend torch")
        encoder, last = ChatEncoder(loaded.tokenizer), skip + prompts
        limits = token_limits(loaded, encoder.encode, max_prompt_tokens)
        asked = islice(source.requests(limits, turns=-(-last // 2))(), skip, last)
        longest = min(max_prompt_tokens, loaded.max_model_len)
        encoded = _encoded(encoder, asked, longest)
        with claimed(out):
            for named in encoded:
                check_place(out, named)
            made = list(_learnt(loaded, encoded, out))
    if as_json:
        emit({"model": loaded.model_id, "profiles": [_described(*pair) for pair in made]})
        return
    for profile, path in made:
        screen().print(_table(profile))
        notes().print(f"written to {path}")


def _encoded(
    encoder: ChatEncoder, requests: Iterable[LoggedRequest], longest: int
) -> dict[str, list[EncodedPrompt]]:
    """By task, each prompt once; those of more than `longest` tokens are left out."""
    found: dict[str, dict[tuple[int, ...], EncodedPrompt]] = {}
    with waiting("reading prompts"):
        for request in requests:
            prompt = request.encode(encoder)
            if len(prompt.ids) <= longest:
                found.setdefault(prompt.task, {}).setdefault(prompt.ids, prompt)
    if not found:
        raise DataError(
            f"no prompt of at most {longest} tokens; raise --max-prompt-tokens "
            "or --prompts, or lower --skip"
        )
    return {task: list(prompts.values()) for task, prompts in found.items()}


def _learnt(
    backend: Calibrates, tasks: dict[str, list[EncodedPrompt]], out: Path
) -> Iterator[tuple[Profile, Path]]:
    """Profiles, each written when it is learnt. `DataError` if no task has anything to learn."""
    empty: list[DataError] = []
    for task, prompts in tasks.items():
        with bar(task, MofNCompleteColumn(), total=len(prompts)) as update:
            try:
                profile = backend.calibrate(prompts, lambda done: update(completed=done))
            except DataError as error:
                empty.append(error)
                continue
        yield profile, profile.save(out)
    if len(empty) == len(tasks):
        raise empty[0]
    for reason in empty:
        notes().print(f"left out: {reason}")


def _figures(entry: CanonicalEntry, npos: int) -> dict[str, Any]:
    mass = entry.mass.float()
    return {
        "chunk": entry.chunk,
        "update": entry.update,
        "prompts": entry.prompts,
        "rows": entry.rows,
        "mass_median": float(mass.median()),
        "share": float(entry.share.mean()),
        "saturated": float((mass == npos - 1).float().mean()),
    }


def _described(profile: Profile, path: Path) -> dict[str, Any]:
    entries = [_figures(each, profile.npos) for each in profile.entries]
    return {"task": profile.task, "path": str(path), "npos": profile.npos, "entries": entries}


def _table(profile: Profile) -> Table:
    """Median mass over layers and heads, the rows in it, and the heads that it saturates."""
    table = Table(title=profile.task, title_justify="left")
    for column in ("chunk", "behind update"):
        table.add_column(column)
    for column in ("prompts", "rows", "mass", "rows at it", "saturated heads"):
        table.add_column(column, justify="right")
    for entry in profile.entries:
        found = _figures(entry, profile.npos)
        table.add_row(
            entry.chunk,
            entry.update,
            str(entry.prompts),
            str(entry.rows),
            f"{found['mass_median']:.0f}",
            f"{found['share']:.0%}",
            f"{found['saturated']:.0%}",
        )
    return table
