"""Decoupling: what it saves that a layer may start before its cached keys and values are there.

In: real turns whose contexts lie on SSD (page cache dropped) or in memory. Out: `on` and `off`,
medians of seconds from SSD, and under `places` the same for every way of loading and both places.

| way | loading |
| --- | --- |
| `off` | ahead, in a thread; a layer starts when its load is done |
| `on` | ahead; a layer waits only to write and attend (the backend's default) |
| `slots` | ahead; corrections that come before their load go to fresh slots, attention waits |
| `inline` | no thread: each layer is loaded, then computed |

`arena_ttft_s` is what `inline` takes without its loads: all keys and values in their slots already.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from cacheslide_agents.backend import Backend, GenerationRequest, Receipt
from cacheslide_agents.bench.runner import Progress, silent
from cacheslide_agents.bench.studies.reopen import reopened
from cacheslide_agents.bench.task_data import AGENTS, Pair, TaskData
from cacheslide_agents.chunks import EncodedPrompt
from cacheslide_agents.pages import SlideStore
from cacheslide_agents.policies import CacheSlide

DEPTH = 4
WAYS: Mapping[str, Mapping[str, Any]] = {
    "off": {"prefetch": DEPTH, "decoupling": "off"},
    "on": {"prefetch": DEPTH, "decoupling": True},
    "slots": {"prefetch": DEPTH, "decoupling": "slots"},
    "inline": {"prefetch": 0, "decoupling": True},
}
PLACES = ("ssd", "memory")
FIELDS = ("wait_s", "load_s", "compute_s", "ttft_s")
_STORE_BYTES = 4 << 30


def run(
    backend: Backend,
    data: Path,
    *,
    save: Callable[[Mapping[str, Any]], None],
    progress: Progress = silent,
    tasks: Sequence[str] = AGENTS,
    limit: int = 2,
    repeats: int = 3,
    seed: int = 0,
    max_prompt_tokens: int = 4096,
    folder: str | None = None,
    earlier: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """`limit` turns per task, each way `repeats` times in rotated order. The store lies in `folder`
    (default: the system's folder for temporary files, which `TMPDIR` sets)."""
    source = TaskData.of(backend, data, limit=limit, seed=seed, max_prompt_tokens=max_prompt_tokens)
    pairs = source.pairs(tasks)
    rows: list[dict[str, Any]] = list((earlier or {}).get("rows", []))
    done = {(row["repeat"], row["way"]) for row in rows}
    with TemporaryDirectory(dir=folder) as path:
        with opened(backend, path) as filling:
            for number, (previous, _) in enumerate(pairs):
                filling.warm(_request(previous, number))
        for repeat in range(repeats):
            order = [*WAYS][repeat % len(WAYS) :] + [*WAYS][: repeat % len(WAYS)]
            for number, way in enumerate(order):
                if (repeat, way) not in done:
                    with opened(backend, path, **WAYS[way]) as again:
                        rows += list(_measured(again, Path(path), pairs, repeat, way))
                    save(_study(backend, rows))
                progress(repeat * len(WAYS) + number + 1, repeats * len(WAYS), way)
    return _study(backend, rows)


@contextmanager
def opened(backend: Backend, path: str, **options: Any) -> Iterator[Backend]:
    """The model again on the store in `path`; nothing of the store is in memory at first."""
    with (
        SlideStore(_STORE_BYTES, path) as store,
        reopened(backend, store=store, **options) as again,
    ):
        yield again


def drop_page_cache(folder: Path) -> None:
    """Have the kernel forget the data of all files in `folder`, so that reads go to the device."""
    for path in (path for path in folder.rglob("*") if path.is_file()):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


def _measured(
    backend: Backend, folder: Path, pairs: Sequence[Pair], repeat: int, way: str
) -> Iterator[dict[str, Any]]:
    """Every turn from SSD, then again: now its context is in memory."""
    for number, (_, prompt) in enumerate(pairs):
        drop_page_cache(folder)
        for place in PLACES:
            receipt = backend.score(_request(prompt, number), prompt.ids[:1]).receipt
            yield {
                "way": way,
                "place": place,
                "repeat": repeat,
                "row": number,
                "outcome": receipt.outcome,
                **_seconds(receipt),
            }


def _seconds(receipt: Receipt) -> dict[str, float]:
    return {field: getattr(receipt, field) for field in FIELDS}


def _request(prompt: EncodedPrompt, number: int) -> GenerationRequest:
    policy = CacheSlide(may_decline=False)
    namespace = f"decoupling-{number}"
    return GenerationRequest.of(prompt, namespace=namespace, policy=policy, retain=False)


def _study(backend: Backend, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    places = {place: _ways([row for row in rows if row["place"] == place]) for place in PLACES}
    headline: dict[str, Any] = {
        way: places["ssd"][way] for way in ("on", "off") if way in places["ssd"]
    }
    return {
        "model": backend.model_id,
        "prefetch": DEPTH,
        **headline,
        "places": places,
        "rows": [dict(row) for row in rows],
    }


def _ways(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Medians over turns and repeats."""
    found: dict[str, dict[str, float]] = {}
    for way in WAYS:
        mine = [row for row in rows if row["way"] == way]
        if mine:
            found[way] = {field: median(row[field] for row in mine) for field in FIELDS}
    if "inline" in found:
        bare = [row["ttft_s"] - row["wait_s"] for row in rows if row["way"] == "inline"]
        found["inline"]["arena_ttft_s"] = median(bare)
    return found
