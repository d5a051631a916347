"""`cacheslide serve`: an OpenAI-compatible server that reuses moved text.

In: a model, our flags, the engine's flags. Out: a server that runs until it is stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from math import isfinite
from pathlib import Path
from typing import Annotated, Any

import typer

from cacheslide_agents.cli import options
from cacheslide_agents.errors import BackendError, RequestError, install_hint

FOREIGN_FLAGS = {"allow_extra_args": True, "ignore_unknown_options": True}
"""How typer is told to leave the engine's flags alone."""

SERVERS = "cacheslide_agents.servers"
ENGINE = "vllm"
APART = ", in an environment of its own"
GIB = 1 << 30

Server = Callable[[str, Sequence[str], Mapping[str, Any]], None]


def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Alias, local folder or hub id; comes first.")],
    policy: Annotated[
        str, typer.Option(help="Reuse policy of requests that name none.")
    ] = "cacheslide",
    store_gib: Annotated[
        float, typer.Option(min=0.0, help="Memory of every worker's page store.")
    ] = 4.0,
    store_path: Annotated[
        Path | None,
        typer.Option(
            parser=options.place("--store-path"),
            help="Folder for contexts that outlive the server.",
        ),
    ] = None,
    disk_gib: Annotated[float, typer.Option(min=0.0, help="Of every worker in there.")] = 64.0,
    eviction: Annotated[
        str, typer.Option(help="What leaves memory first: slide, lru_write_through, ...")
    ] = "slide",
    ttl_s: Annotated[
        float | None, typer.Option(help="Seconds after its last use that a context goes.")
    ] = None,
    namespace_gib: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="Most that one namespace of a tenant may keep in a worker.",
        ),
    ] = None,
    tenant_gib: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="Most that one tenant may keep in a worker, all its namespaces together.",
        ),
    ] = None,
    attention: Annotated[str, typer.Option(help="Of active rows: runs, fused or masked.")] = "runs",
    profiles: options.Profiles = None,
    tenant_header: Annotated[
        str, typer.Option(help="Header that tells tenants apart, besides their API keys.")
    ] = "",
) -> None:
    """Serve MODEL with vLLM, chunk plans of clients included.

    All other flags are those of `vllm serve`: --port, --api-key, --max-model-len, ...
    """
    if model.startswith("-"):
        raise RequestError(f"name the model before the first flag, here {model}")
    settings = {
        "policy": policy,
        "store_bytes": _bytes("store-gib", store_gib),
        "store_path": None if store_path is None else str(store_path),
        "disk_bytes": _bytes("disk-gib", disk_gib),
        "eviction": eviction,
        "ttl_s": ttl_s,
        "namespace_quota_bytes": _bytes_or_none("namespace-gib", namespace_gib),
        "tenant_quota_bytes": _bytes_or_none("tenant-gib", tenant_gib),
        "attention": attention,
        "profiles": [str(each) for each in profiles or ()],
        "tenant_header": tenant_header,
    }
    _server()(model, context.args, settings)


def _bytes(flag: str, gib: float) -> int:
    if not isfinite(gib):
        raise RequestError(f"--{flag}={gib} is no size; give a finite number of GiB")
    return int(gib * GIB)


def _bytes_or_none(flag: str, gib: float | None) -> int | None:
    return None if gib is None else _bytes(flag, gib)


def _server() -> Server:
    for entry in entry_points(group=SERVERS, name=ENGINE):
        try:
            found: Server = entry.load()
        except ImportError as error:
            raise BackendError(
                f"serving needs a package that is not installed ({error}); "
                f"{install_hint(ENGINE)}{APART}"
            ) from error
        return found
    raise BackendError(f"no server is installed; {install_hint(ENGINE)}{APART}")
