"""SSD: what a context costs that has to come from there, against computing and against the disk.

In: real turns, each with a store of its own on disk. Out: `ttft_speedup`, how much sooner the first
token comes when the context is read from SSD than when the prompt is recomputed, and `read_ratio`,
the speed of reading a whole context (verified, ready for attention) over that of reading the same
files as bytes; medians of paired ratios, page cache dropped before every reading.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from cacheslide_agents.backend import Backend, GenerationRequest
from cacheslide_agents.bench.runner import Progress, silent
from cacheslide_agents.bench.studies.decoupling import drop_page_cache, opened
from cacheslide_agents.bench.studies.oracle import KeepsContexts
from cacheslide_agents.bench.task_data import ANSWERERS, TaskData
from cacheslide_agents.chunks import EncodedPrompt
from cacheslide_agents.errors import BackendError
from cacheslide_agents.pages import SlideStore
from cacheslide_agents.policies import CacheSlide, Recompute

_READ_BYTES = 1 << 20
Row = dict[str, Any]


def run(
    backend: Backend,
    data: Path,
    *,
    save: Callable[[Mapping[str, Any]], None],
    progress: Progress = silent,
    tasks: Sequence[str] = ANSWERERS,
    limit: int = 2,
    repeats: int = 3,
    seed: int = 0,
    max_prompt_tokens: int = 4096,
    folder: str | None = None,
) -> dict[str, Any]:
    """`limit` turns per task, each `repeats` times. The stores lie in `folder` (default: the
    system's folder for temporary files, which `TMPDIR` sets)."""
    source = TaskData.of(backend, data, limit=limit, seed=seed, max_prompt_tokens=max_prompt_tokens)
    turns, encode = source.turns(tasks), source.encode
    rows: list[Row] = []
    for number, turn in enumerate(turns):
        about = {"task": turn.task, "id": turn.id}
        with TemporaryDirectory(dir=folder) as path:
            with opened(backend, path) as filling:
                filling.warm(
                    GenerationRequest.of(encode(turn.populate), policy=CacheSlide(), retain=False)
                )
            now = encode(turn.measure)
            for _ in range(repeats):
                rows.append(about | _answered(backend, path, now) | _read(backend, path))
        save(_study(backend, rows))
        progress(number + 1, len(turns), f"{turn.task}: {turn.id}")
    return _study(backend, rows)


def _answered(backend: Backend, path: str, prompt: EncodedPrompt) -> Row:
    """Seconds to the first token: recomputed, and with the context on SSD."""
    fresh = GenerationRequest.of(prompt, policy=Recompute(), retain=False)
    stored = GenerationRequest.of(prompt, policy=CacheSlide(may_decline=False), retain=False)
    dense = backend.score(fresh, prompt.ids[:1]).receipt
    with opened(backend, path) as again:
        drop_page_cache(Path(path))
        reused = again.score(stored, prompt.ids[:1]).receipt
    return {
        "prompt_tokens": len(prompt.ids),
        "outcome": reused.outcome,
        "recompute_ttft_s": dense.ttft_s,
        "ssd_ttft_s": reused.ttft_s,
    }


def _read(backend: Backend, path: str) -> Row:
    """Seconds to read everything that was stored: as bytes, and through the store."""
    drop_page_cache(Path(path))
    started = perf_counter()
    file_bytes = sum(_read_file(file) for file in sorted(Path(path).rglob("*.pages")))
    plain = perf_counter() - started
    if not file_bytes:
        raise BackendError("the store wrote no context to SSD; look in the log for its reason")
    with opened(backend, path) as again:
        drop_page_cache(Path(path))
        started = perf_counter()
        loaded_bytes = _load_everything(again)
        through = perf_counter() - started
    return {
        "file_bytes": file_bytes,
        "loaded_bytes": loaded_bytes,
        "plain_read_s": plain,
        "store_read_s": through,
    }


def _load_everything(backend: Backend) -> int:
    assert isinstance(backend, KeepsContexts) and isinstance(backend.store, SlideStore)
    return sum(
        keys.nbytes + values.nbytes
        for context in backend.store.contexts()
        for layer in range(backend.layers)
        for keys, values in [backend.store.load(context, layer)]
    )


def _read_file(path: Path) -> int:
    buffer = memoryview(bytearray(_READ_BYTES))
    total = 0
    file = os.open(path, os.O_RDONLY)
    try:
        while got := os.readv(file, [buffer]):
            total += got
    finally:
        os.close(file)
    return total


def _study(backend: Backend, rows: Sequence[Row]) -> dict[str, Any]:
    return {
        "model": backend.model_id,
        "ttft_speedup": median(row["recompute_ttft_s"] / row["ssd_ttft_s"] for row in rows),
        "read_ratio": median(
            (row["loaded_bytes"] / row["store_read_s"]) / (row["file_bytes"] / row["plain_read_s"])
            for row in rows
        ),
        "rows": list(rows),
    }
