"""Has many sessions ask one vLLM engine for some minutes, and judges what it answers and holds.

In: minutes, perhaps a model and a folder for contexts on SSD. Out: one JSON and an exit code, 1 if
anything was wrong: an error, an answer that a dense run alone does not give, blocks that are never
freed, memory that grows. The engine's blocks and the store are too few for all sessions, so that
requests wait, are preempted, and find their contexts gone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from soak_vllm_sessions import Record, Session, check
from tiny_llama import VOCABULARY, write_tiny_llama

TEXT_TOKENS = 480
BLOCKS = 48
"""Blocks of 128 tokens: about ten prompts with their answers."""
MOST_GROWTH = 0.05
"""Of resident memory, from the first third of the run (caches fill) to its end."""
SAMPLE_S = 1.0


def main(words: Sequence[str] | None = None) -> int:
    given = arguments(words)
    with TemporaryDirectory() as folder:
        model = given.model or write_tiny_llama(Path(folder))
        backend = engine(str(model), given)
        try:
            found = asyncio.run(soak(backend, given))
        finally:
            backend.close()
    given.out.write_text(json.dumps(found, indent=1) + "\n")
    told = {name: found[name] for name in ("asked", "outcomes", "checked", "ties", "rss_growth")}
    print(json.dumps(told))
    for error in found["errors"]:
        print(f"error: {error}", file=sys.stderr)
    return 1 if found["errors"] else 0


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--sessions", type=int, default=20)
    parser.add_argument("--store-mib", type=int, default=24, help="budget of the page store")
    parser.add_argument("--store-path", type=Path, help="folder for contexts on SSD")
    parser.add_argument("--model", help="default: a tiny one with random weights")
    parser.add_argument("--dtype", default="float32", help="others have ties that are no errors")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("soak_vllm.json"))
    return parser.parse_args(words)


def engine(model: str, given: argparse.Namespace) -> Any:
    from vllm_cacheslide.backend import VllmBackend

    return VllmBackend(
        model,
        dtype=given.dtype,
        store_bytes=given.store_mib << 20,
        store_path=given.store_path,
        max_model_len=1024,
        max_num_seqs=16,
        max_num_batched_tokens=512,
        num_gpu_blocks_override=BLOCKS,
        block_size=128,
        enforce_eager=True,
    )


async def soak(backend: Any, given: argparse.Namespace) -> dict[str, Any]:
    """Everything the JSON holds."""
    started, record = perf_counter(), Record()
    ends = started + 60 * given.minutes
    random = Random(given.seed)
    text = [random.randrange(2, VOCABULARY) for _ in range(TEXT_TOKENS)]
    sessions = [
        Session(backend, number, text, record, given.seed) for number in range(given.sessions)
    ]
    memory: list[tuple[float, float]] = []
    watching = asyncio.create_task(watch(memory, started))
    if backend.off:
        record.errors.append(f"nothing is reused: {backend.off}")
    await asyncio.gather(*(session.run(lambda: perf_counter() >= ends) for session in sessions))
    watching.cancel()
    seconds = perf_counter() - started
    await check(backend, record)
    try:
        await asyncio.to_thread(backend.forget_prefixes)
    except Exception as error:
        record.errors.append(f"blocks are still in use: {error}")
    grown = growth([mib for _, mib in memory])
    if grown > MOST_GROWTH:
        record.errors.append(f"resident memory has grown by {grown:.1%}")
    for name in ("reused", "corrected", "dense", "aborted"):
        if not record.asked[name]:
            record.errors.append(f"no request was {name}: raise --minutes")
    return {
        "schema": 1,
        "model": backend.model_id,
        "minutes": given.minutes,
        "sessions": given.sessions,
        "store_mib": given.store_mib,
        "seed": given.seed,
        "seconds": seconds,
        "asked": dict(record.asked),
        "outcomes": dict(record.outcomes),
        "fallbacks": dict(record.reasons),
        "checked": record.checked,
        "ties": record.ties,
        "rss_growth": grown,
        "rss_mib": memory,
        "metrics": dict(backend.metrics()),
        "errors": record.errors,
    }


async def watch(memory: list[tuple[float, float]], started: float) -> None:
    """Adds seconds and resident MiB of this process, in which the engine runs, until cancelled."""
    while True:
        memory.append((perf_counter() - started, resident_mib()))
        await asyncio.sleep(SAMPLE_S)


def resident_mib() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise OSError("/proc/self/status has no VmRSS")


def growth(mib: Sequence[float]) -> float:
    """The last sixth over the sixth that follows the first third, by their medians, less one."""
    sixth = max(1, len(mib) // 6)
    settled = mib[len(mib) // 3 :][:sixth]
    return median(mib[-sixth:]) / median(settled) - 1.0


if __name__ == "__main__":
    sys.exit(main())
