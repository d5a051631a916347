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
from cacheslide_agents.bench.runner import Progress, silent, token_limits
from cacheslide_agents.bench.studies.decoupling import drop_page_cache, opened
from cacheslide_agents.bench.studies.oracle import KeepsContexts
from cacheslide_agents.bench.workloads import load_turns
from cacheslide_agents.chunks import EncodedPrompt
from cacheslide_agents.errors import BackendError
from cacheslide_agents.pages import SlideStore
from cacheslide_agents.policies import CacheSlide, Policy, Recompute
from cacheslide_agents.prompt.chat import ChatEncoder

TASKS = ("reflexion", "memgpt")
_READ_BYTES = 1 << 20
Row = dict[str, Any]


def run(
    backend: Backend,
    data: Path,
    *,
    save: Callable[[Mapping[str, Any]], None],
    progress: Progress = silent,
    tasks: Sequence[str] = TASKS,
    limit: int = 2,
    repeats: int = 3,
    seed: int = 0,
    max_prompt_tokens: int = 4096,
    folder: str | None = None,
) -> dict[str, Any]:
    """`limit` turns per task, each `repeats` times. The stores lie in `folder` (default: the
    system's folder for temporary files, which `TMPDIR` sets)."""
    encode = ChatEncoder(backend.tokenizer).encode
    limits = token_limits(backend, encode, max_prompt_tokens)
    turns = [
        turn for task in tasks for turn in load_turns(task, data, limits, limit=limit, seed=seed)
    ]
    rows: list[Row] = []
    for number, turn in enumerate(turns):
        about = {"task": turn.task, "id": turn.id}
        with TemporaryDirectory(dir=folder) as path:
            with opened(backend, path) as filling:
                filling.warm(_request(encode(turn.populate), CacheSlide()))
            now = encode(turn.measure)
            for _ in range(repeats):
                rows.append(about | _answered(backend, path, now) | _read(backend, path))
        save(_study(backend, rows))
        progress(number + 1, len(turns), f"{turn.task}: {turn.id}")
    return _study(backend, rows)


def _answered(backend: Backend, path: str, prompt: EncodedPrompt) -> Row:
    """Seconds to the first token: recomputed, and with the context on SSD."""
    dense = backend.score(_request(prompt, Recompute()), prompt.ids[:1]).receipt
    with opened(backend, path) as again:
        drop_page_cache(Path(path))
        request = _request(prompt, CacheSlide(may_decline=False))
        reused = again.score(request, prompt.ids[:1]).receipt
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


def _request(prompt: EncodedPrompt, policy: Policy) -> GenerationRequest:
    return GenerationRequest(
        prompt_ids=prompt.ids,
        spans=prompt.spans,
        task=prompt.task,
        policy=policy,
        retain=False,
    )


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
