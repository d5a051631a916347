"""Whole agent episodes with reuse and without: what an agent's user waits for.

In: episodes of the three agents, live and replayed. Out: `rows`, one for each episode and policy:
wall time, time spent in the model, calls, score; and `points`, their medians.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from random import Random
from statistics import mean, median
from time import perf_counter
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from cacheslide_agents.backend import Backend
from cacheslide_agents.bench.runner import Progress, silent
from cacheslide_agents.errors import BackendError, DataError, install_hint

if TYPE_CHECKING:
    from cacheslide_agents.bench.episodes import Episode

DENSE = "recompute"
POLICIES = (DENSE, "prefix", "cacheslide")
MODES = ("live", "replay")
MAX_TOKENS = 64
"""Of every answer; replayed ones are thrown away, but the time to write them counts."""


@dataclass(frozen=True, slots=True)
class EpisodeRow:
    """One episode under one policy. Times in seconds; `score` from 0 to 1, if there is one.

    `llm_s`: wall time of all model calls; `ttft_s`: of all their first tokens; token counts are
    sums over the calls.
    """

    agent: str
    mode: str
    id: str
    policy: str
    wall_s: float
    llm_s: float
    ttft_s: float
    calls: int
    score: float | None
    prompt_tokens: int
    reused_tokens: int
    fallbacks: int


def run(
    backend: Backend,
    data: Path,
    *,
    save: Callable[[Mapping[str, Any]], None],
    progress: Progress = silent,
    agents: Sequence[str] | None = None,
    modes: Sequence[str] = MODES,
    policies: Sequence[str] = POLICIES,
    limit: int = 2,
    seed: int = 0,
    max_prompt_tokens: int | None = None,
    earlier: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Play `limit` episodes of each agent and mode under every policy, in rotating order.

    Every playing has a namespace of its own, so that nothing is reused from another one.
    `max_prompt_tokens` has no meaning here: the agents bound their own prompts. Episodes that an
    `earlier` run has played under every policy are kept.
    """
    rows = _complete(earlier or {}, policies)
    played = {(row.mode, row.agent, row.id) for row in rows}
    chosen = _chosen(data, agents, modes, limit, seed)
    episodes = [(mode, one) for mode, one in chosen if (mode, one.agent, one.id) not in played]
    if episodes:  # the first run of a process pays for what is set up lazily
        _play(backend, *episodes[0], policies[0])
    for number, (mode, episode) in enumerate(episodes):
        turned = number % len(policies)
        for policy in (*policies[turned:], *policies[:turned]):
            rows.append(_play(backend, mode, episode, policy))
        save(_study(backend, rows))
        progress(number + 1, len(episodes), f"{episode.agent}, {mode}: {episode.id}")
    return _study(backend, rows)


def points(rows: Sequence[EpisodeRow]) -> list[dict[str, Any]]:
    """Medians by agent, mode and policy. Ratios to dense are paired episode by episode."""
    groups: dict[tuple[str, str, str], list[EpisodeRow]] = defaultdict(list)
    for row in rows:
        groups[row.agent, row.mode, row.policy].append(row)
    return [
        _point(group, groups.get((agent, mode, DENSE), []))
        for (agent, mode, _), group in groups.items()
    ]


def _point(group: Sequence[EpisodeRow], dense: Sequence[EpisodeRow]) -> dict[str, Any]:
    scores = [row.score for row in group if row.score is not None]
    known = {base.id: base for base in dense}
    pairs = [(known[row.id], row) for row in group if row.id in known]
    first = group[0]
    return {
        "agent": first.agent,
        "mode": first.mode,
        "policy": first.policy,
        "episodes": len(group),
        "wall_s": median(row.wall_s for row in group),
        "llm_s": median(row.llm_s for row in group),
        "ttft_s": median(row.ttft_s for row in group),
        "calls": mean(row.calls for row in group),
        "score": mean(scores) if scores else None,
        "reused": sum(r.reused_tokens for r in group) / max(1, sum(r.prompt_tokens for r in group)),
        "wall_speedup": median(base.wall_s / row.wall_s for base, row in pairs) if pairs else None,
        "llm_speedup": median(base.llm_s / row.llm_s for base, row in pairs) if pairs else None,
        "ttft_speedup": median(base.ttft_s / row.ttft_s for base, row in pairs) if pairs else None,
    }


def _complete(earlier: Mapping[str, Any], policies: Sequence[str]) -> list[EpisodeRow]:
    """Rows of the episodes that were played under every policy."""
    rows = [EpisodeRow(**row) for row in earlier.get("rows", ())]
    ran = Counter((row.mode, row.agent, row.id) for row in rows if row.policy in policies)
    return [row for row in rows if ran[row.mode, row.agent, row.id] == len(policies)]


def _chosen(
    data: Path, agents: Sequence[str] | None, modes: Sequence[str], limit: int, seed: int
) -> Iterator[tuple[str, Episode]]:
    known = _agents()
    for agent in known if agents is None else agents:
        if agent not in known:
            raise DataError(f"no agent named {agent!r}; known: {', '.join(known)}")
        for mode in modes:
            if mode not in MODES:
                raise DataError(f"no mode named {mode!r}; known: {', '.join(MODES)}")
            found = list(known[agent](data, mode))
            Random(seed).shuffle(found)
            if not found:
                raise DataError(f"{data} holds no episode of {agent!r} to play in mode {mode!r}")
            yield from ((mode, episode) for episode in islice(found, limit))


def _agents() -> dict[str, Callable[[Path, str], Iterator[Episode]]]:
    try:
        from cacheslide_agents.bench.episodes import AGENTS
    except ImportError as error:
        raise BackendError(
            f"whole episodes need LangChain and LangGraph ({error}); {install_hint('agents')}"
        ) from error
    return AGENTS


def _play(backend: Backend, mode: str, episode: Episode, policy: str) -> EpisodeRow:
    from langchain_cacheslide import ChatCacheSlide
    from langchain_cacheslide.agents import CallLog

    name = f"{episode.agent}-{uuid4().hex}"
    model = ChatCacheSlide(backend=backend, policy=policy, namespace=name, max_tokens=MAX_TOKENS)
    log = CallLog()
    start = perf_counter()
    score = episode.play(model, {"callbacks": [log], "configurable": {"thread_id": name}})
    wall = perf_counter() - start
    receipts = [call.receipt for call in log.calls]
    return EpisodeRow(
        agent=episode.agent,
        mode=mode,
        id=episode.id,
        policy=policy,
        wall_s=wall,
        llm_s=log.seconds,
        ttft_s=sum(receipt["ttft_s"] for receipt in receipts),
        calls=len(log.calls),
        score=score,
        prompt_tokens=sum(receipt["prompt_tokens"] for receipt in receipts),
        reused_tokens=sum(receipt["reused_tokens"] for receipt in receipts),
        fallbacks=sum(receipt["outcome"] == "fallback" for receipt in receipts),
    )


def _study(backend: Backend, rows: Sequence[EpisodeRow]) -> dict[str, Any]:
    return {
        "model": backend.model_id,
        "max_tokens": MAX_TOKENS,
        "rows": [asdict(row) for row in rows],
        "points": points(rows),
    }
