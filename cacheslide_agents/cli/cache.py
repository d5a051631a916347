"""`cacheslide cache`: what lies in a page store on SSD.

In: a store's folder. Out: its contexts, sizes or faults; with `gc` and `rm` less of it. Looking
works while another process writes; changing needs the store for itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from cacheslide_agents.cli import options
from cacheslide_agents.cli.console import emit, notes, screen
from cacheslide_agents.cli.exit_codes import DOES_NOT_HOLD
from cacheslide_agents.errors import RequestError, StoreError

if TYPE_CHECKING:
    from cacheslide_agents.pages.disk import Disk
    from cacheslide_agents.pages.slide import SlideStore

Store = Annotated[
    Path, typer.Option("--store", parser=options.place("--store"), help="The store's folder.")
]
Rank = Annotated[int, typer.Option(min=0, help="Tensor-parallel rank whose part is meant.")]
Namespace = Annotated[str | None, typer.Option(help="Only this tenant's contexts.")]
Task = Annotated[str | None, typer.Option(help="Only contexts of this kind of prompt.")]
Session = Annotated[str | None, typer.Option(help="Only this session's contexts.")]

COLUMNS = ("namespace", "task", "session", "tokens", "exact", "bytes", "created")
app = typer.Typer(name="cache", help="Look into a page store, and clean up.", no_args_is_help=True)


@app.command("ls")
def list_contexts(
    store: Store,
    rank: Rank = 0,
    namespace: Namespace = None,
    task: Task = None,
    session: Session = None,
    as_json: options.Json = False,
) -> None:
    """List the stored contexts, oldest first."""
    with _reading(store, rank) as disk:
        rows = [
            _told(row.context, row.geometry.token_bytes)
            for row in disk.contexts
            if _matches(row.context, namespace, task, session)
        ]
    if as_json:
        emit(rows)
        return
    table = Table(title=str(store))
    for column in COLUMNS:
        right = column in {"tokens", "exact", "bytes"}
        table.add_column(column, justify="right" if right else "left")
    for row in rows:
        shown = {**row, "session": row["session"] or ("(alone)" if row["isolated"] else "-")}
        table.add_row(*(str(shown[column]) for column in COLUMNS))
    screen().print(table)


@app.command()
def stat(store: Store, rank: Rank = 0, as_json: options.Json = False) -> None:
    """Sum up what the store holds and what it takes on SSD."""
    with _reading(store, rank) as disk:
        tokens: Counter[str] = Counter()
        for row in disk.contexts:
            tokens[row.context.key.namespace] += len(row.context)
        shapes = disk.extents.values()
        found = {
            "contexts": len(disk.contexts),
            "extents": len(disk.extents),
            "pages": sum(geometry.layers * live for geometry, _, live in shapes),
            "bytes": disk.nbytes,
            "dead_bytes": disk.dead_bytes,
            "damaged_rows": disk.damaged,
            "lost_contexts": disk.missing,
            "tokens_by_namespace": dict(tokens),
        }
    if as_json:
        emit(found)
        return
    table = Table("what", "value", title=str(store))
    for name, value in found.items():
        for line in value.items() if isinstance(value, dict) else [(None, value)]:
            table.add_row(name if line[0] is None else f"tokens of {line[0]}", str(line[1]))
    screen().print(table)


@app.command()
def verify(store: Store, rank: Rank = 0, as_json: options.Json = False) -> None:
    """Read every page and compare its checksum; exit code 1 when one is not as it was written."""
    from cacheslide_agents.pages.audit import audit

    with _reading(store, rank) as disk:
        faults = list(audit(disk))
        pages = sum(geometry.layers * live for geometry, _, live in disk.extents.values())
    if as_json:
        emit({"holds": not faults, "pages": pages, "faults": [asdict(f) for f in faults]})
    else:
        for fault in faults:
            print("FAIL", fault.what)
        if not faults:
            print(f"ok   {pages} pages are as they were written")
    if faults:
        raise typer.Exit(DOES_NOT_HOLD)


@app.command()
def gc(store: Store, rank: Rank = 0, as_json: options.Json = False) -> None:
    """Rewrite extents that hold pages nobody needs, without them."""
    with _writing(store, rank) as opened:
        freed = opened.gc()
    if as_json:
        emit({"freed_bytes": freed})
    else:
        notes().print(f"{freed} bytes freed")


@app.command()
def rm(
    store: Store,
    rank: Rank = 0,
    namespace: Namespace = None,
    task: Task = None,
    session: Session = None,
    everything: Annotated[bool, typer.Option("--all", help="Every context.")] = False,
    as_json: options.Json = False,
) -> None:
    """Forget contexts, by tenant, kind of prompt or session."""
    chosen = (namespace, task, session)
    if everything == any(name is not None for name in chosen):
        raise RequestError("say which: --namespace, --task and --session together, or --all alone")
    with _writing(store, rank) as opened:
        found = [context for context in opened.contexts() if _matches(context, *chosen)]
        removed = opened.remove(found)
        spared = int(opened.metrics()["spared_extents"])
    if spared:
        raise StoreError(
            f"{removed} contexts removed, but {spared} extents stay for contexts that could not be "
            "looked at; see `cacheslide cache verify`, mend the disk, and remove again"
        )
    if as_json:
        emit({"removed": removed})
    else:
        notes().print(f"{removed} contexts removed")


@contextmanager
def _reading(store: Path, rank: int) -> Iterator[Disk]:
    from cacheslide_agents.pages.disk import Disk

    disk = Disk(store, rank=rank, read_only=True)
    try:
        yield disk
    finally:
        disk.close()


@contextmanager
def _writing(store: Path, rank: int) -> Iterator[SlideStore]:
    """Never makes a store where there is none."""
    from cacheslide_agents.pages.limits import GIB
    from cacheslide_agents.pages.slide import SlideStore

    with _reading(store, rank):
        pass
    with SlideStore(GIB, store, rank=rank, disk_bytes=1 << 62, pin_memory=False) as opened:
        yield opened


def _matches(context: Any, namespace: str | None, task: str | None, session: str | None) -> bool:
    found = (context.key.namespace, context.key.task, context.session)
    wanted = (namespace, task, session)
    return all(want in (None, have) for have, want in zip(found, wanted, strict=True))


def _told(context: Any, token_bytes: int) -> dict[str, Any]:
    return {
        "namespace": context.key.namespace,
        "task": context.key.task,
        "session": context.session,
        "isolated": context.isolated,
        "tokens": len(context),
        "exact": int(context.exact.sum()),
        "bytes": len(context) * token_bytes,
        "created": datetime.fromtimestamp(context.created, UTC).isoformat(timespec="seconds"),
        "fingerprint": context.key.fingerprint,
    }
