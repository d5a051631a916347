"""How the gain grows with the prompt: one edit of fixed size in prompts of growing length.

In: running text of the data folder. Out: `points`, one for each length and policy: TTFT, its ratio
to dense prefill, compute fraction, KL.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from cacheslide_agents.backend import Backend
from cacheslide_agents.bench.datasets import texts
from cacheslide_agents.bench.measure import REFERENCE, Bench
from cacheslide_agents.bench.results import Row
from cacheslide_agents.bench.runner import Progress, silent
from cacheslide_agents.bench.workloads import Turn
from cacheslide_agents.chunks import Chunk, ChunkedPrompt, Message, Role
from cacheslide_agents.errors import DataError
from cacheslide_agents.policies import named
from cacheslide_agents.prompt.chat import ChatEncoder

TOKENS = (1000, 2000, 4000, 8000)
POLICIES = (REFERENCE, "prefix", "cacheslide")
MEMORY = ("The reader is called Anna and lives in Bergen.", "She prefers short answers.")
ADDED = "On Monday she asked about the first chapter and was told to read it twice."
QUESTION = "In one sentence, what does this text speak about?"


def run(
    backend: Backend,
    data: Path,
    *,
    save: Callable[[Mapping[str, Any]], None],
    progress: Progress = silent,
    tokens: Sequence[int] = TOKENS,
    limit: int = 3,
    seed: int = 0,
    max_prompt_tokens: int = TOKENS[-1],
) -> dict[str, Any]:
    """Measure `limit` texts at each length; `seed` chooses where in the data they start."""
    encode = ChatEncoder(backend.tokenizer).encode
    bench = Bench(backend, encode, answer_tokens=0)
    policies = {name: named(name) for name in POLICIES}
    lengths = [each for each in tokens if each <= max_prompt_tokens]
    material = "\n\n".join(texts(data / "text" / "valid.jsonl"))
    points: list[dict[str, Any]] = []
    for step, length in enumerate(lengths):
        rows: list[Row] = []
        for number in range(limit):
            turn = _turn(material, (seed + number) * 9973, length, bench)
            populated = bench.populate(turn, policies)
            if not points and not rows:
                bench.warm_up(populated, policies)
            rows += bench.measure(populated, policies, rotate=number)
            progress(step * limit + number + 1, len(lengths) * limit, f"{length} tokens")
        points += _points(length, rows)
        save({"model": backend.model_id, "points": points})
    return {"model": backend.model_id, "points": points}


def _turn(material: str, start: int, length: int, bench: Bench) -> Turn:
    """A prompt of about `length` tokens whose memory gains a line near its head."""
    characters = length * 4
    while True:
        document = material[start : start + characters]
        if len(document) < characters:
            raise DataError(f"the text data ends before a prompt of {length} tokens is full")
        measure = _prompt((*MEMORY, ADDED), document)
        excess = len(bench.encode(measure).ids) - length
        if -8 <= excess <= 0:
            break
        characters -= 3 * excess
    return Turn(f"text-{start}-{length}", 1, "length", _prompt(MEMORY, document), measure)


def _prompt(memory: Sequence[str], document: str) -> ChunkedPrompt:
    chunks = (
        Chunk("system", "You answer questions about a text.\n", Role.REUSE),
        Chunk("memory", "".join(f"- {line}\n" for line in memory)),
        Chunk("document", f"\n{document}\n", Role.REUSE),
        Chunk("question", QUESTION),
    )
    return ChunkedPrompt((Message("user", chunks),), "length")


def _points(length: int, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Medians over the texts of one length; ratios are paired text by text."""
    found = []
    dense = [row.ttft_s for row in rows if row.policy == REFERENCE]
    for policy in POLICIES:
        mine = [row for row in rows if row.policy == policy]
        ratios = [base / row.ttft_s for base, row in zip(dense, mine, strict=True)]
        found.append(
            {
                "tokens": length,
                "policy": policy,
                "ttft_s": median(row.ttft_s for row in mine),
                "ttft_speedup_vs_recompute": median(ratios),
                "compute_fraction": median(row.compute_fraction for row in mine),
                "active_tokens": median(row.active_tokens for row in mine),
                "kl_mean": sum(row.kl for row in mine) / len(mine),
            }
        )
    return found
