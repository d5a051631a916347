"""Drift: how far answers move from dense when context after context is built on reused ones.

In: sessions of many turns. Out: `turns`, for each task, refresh mode and turn: KL to the dense run,
and tokens recomputed. Modes: `corrected` (recomputed tokens replace the stored ones), `never` (they
do not), `guarded` (corrected, and the quality guard checks every turn: when it trips, the stored
contexts are computed densely in idle time, and the next turn is answered densely).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from cacheslide_agents.answered import answered
from cacheslide_agents.backend import Backend, GenerationRequest, Sampling, Scores
from cacheslide_agents.bench.measure import Encode
from cacheslide_agents.bench.metrics import kl_divergence, top1_agreement
from cacheslide_agents.bench.runner import Progress, silent, token_limits
from cacheslide_agents.bench.studies.reopen import reopened, settle
from cacheslide_agents.bench.task_data import AGENTS
from cacheslide_agents.bench.workloads.chains import Chain, chains
from cacheslide_agents.chunks import EncodedPrompt
from cacheslide_agents.errors import DataError
from cacheslide_agents.policies import CacheSlide, Recompute
from cacheslide_agents.prompt.chat import ChatEncoder

GUARD_BUDGET = 0.01
"""Nats; well under the default, so that the study shows what a refresh does."""
_SAVES = 2
"""Reuses of one turn, the scored one and the stored one: the guard looks at every second."""
MODES: Mapping[str, Mapping[str, Any]] = {
    "corrected": {"refresh": "corrected"},
    "never": {"refresh": "never"},
    "guarded": {"refresh": "corrected", "guard_every": _SAVES, "guard_budget": GUARD_BUDGET},
}


@dataclass(frozen=True)
class _Turn:
    prompt: EncodedPrompt
    forced: tuple[int, ...]
    dense: Scores


def run(
    backend: Backend,
    data: Path,
    *,
    save: Callable[[Mapping[str, Any]], None],
    progress: Progress = silent,
    tasks: Sequence[str] = AGENTS,
    modes: Sequence[str] = tuple(MODES),
    limit: int = 1,
    turns: int = 20,
    kl_tokens: int = 16,
    seed: int = 0,
    max_prompt_tokens: int = 4096,
    earlier: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """`limit` sessions of `turns` turns per task, from the `seed`-th on; each under every mode."""
    encode = ChatEncoder(backend.tokenizer).encode
    limits = token_limits(backend, encode, max_prompt_tokens)
    rows: list[dict[str, Any]] = list((earlier or {}).get("turns", []))
    done = {(row["session"], row["refresh"]) for row in rows if row["turn"] == turns}
    rows = [row for row in rows if (row["session"], row["refresh"]) in done]
    steps = limit * len(tasks) * len(modes)
    step = 0
    for task in tasks:
        for chain in _chosen(task, data, limits, limit=limit, turns=turns, seed=seed):
            wanted = [mode for mode in modes if (chain.id, mode) not in done]
            measured = _dense(backend, encode, chain, kl_tokens) if wanted else []
            for mode in modes:
                if mode in wanted:
                    with reopened(backend, **MODES[mode]) as again:
                        rows += _chained(again, chain, mode, measured)
                    save(_study(backend, rows))
                step += 1
                progress(step, steps, f"{task}: {chain.id}, {mode}")
    return _study(backend, rows)


def _chosen(
    task: str, data: Path, limits: Any, *, limit: int, turns: int, seed: int
) -> list[Chain]:
    found = list(chains(task, data, limits, turns=turns))
    if not found:
        raise DataError(f"no session of {task!r} in {data} has {turns} turns; lower turns")
    return [found[(seed + number) % len(found)] for number in range(min(limit, len(found)))]


def _dense(backend: Backend, encode: Encode, chain: Chain, kl_tokens: int) -> list[_Turn]:
    """The greedy tokens of the dense run of every turn, and its distributions before them."""
    found = []
    for prompt in map(encode, chain.prompts):
        request = GenerationRequest.of(
            prompt,
            namespace="dense",
            sampling=Sampling(max_tokens=kl_tokens),
            policy=Recompute(),
            retain=False,
        )
        forced = answered(backend, request).token_ids[:kl_tokens]
        found.append(_Turn(prompt, forced, backend.score(request, forced)))
    return found


def _chained(
    backend: Backend, chain: Chain, mode: str, turns: Sequence[_Turn]
) -> Iterator[dict[str, Any]]:
    """Score each turn on what the last one stored, then store it; turn 0 only fills the store."""
    namespace, policy = f"drift-{uuid4().hex}", CacheSlide()
    for number, turn in enumerate(turns):
        request = GenerationRequest.of(
            turn.prompt, namespace=namespace, session=chain.id, policy=policy, retain=False
        )
        if number:
            refreshes = backend.metrics()["refreshes"]
            scores = backend.score(request, turn.forced)
        backend.warm(request)
        settle(backend)
        if number:
            receipt = scores.receipt
            yield {
                "task": chain.task,
                "session": chain.id,
                "refresh": mode,
                "turn": number,
                "kl": kl_divergence(turn.dense.logprobs, scores.logprobs),
                "top1": top1_agreement(turn.dense.logprobs, scores.logprobs),
                "recomputed": receipt.active_tokens,
                "prompt_tokens": receipt.prompt_tokens,
                "outcome": receipt.outcome,
                "reason": receipt.reason,
                "refreshed": backend.metrics()["refreshes"] - refreshes,
            }


def _study(backend: Backend, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "model": backend.model_id,
        "guard_budget": GUARD_BUDGET,
        "turns": [dict(row) for row in rows],
    }
