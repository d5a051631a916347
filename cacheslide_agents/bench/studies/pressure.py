"""Pressure: many agents share one page store that cannot hold them all in memory.

In: sessions of real agents, interleaved turn by turn. Out: `runs`, one for each number of sessions:
bytes written, hit rate and time waited under three evictions, and what Prompt Cache would hold.

Real: prompts, tokens, plans (made against what the store still has), which pages are read, shared,
corrected, evicted and written, the files, the waits. Simulated, and named in the JSON: keys and
values are random numbers of a narrower `geometry`; computing is slept, layer by layer, for active
rows times a row's time, which was measured on the loaded model and scaled as the bytes are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

from cacheslide_agents.backend import Backend, GenerationRequest
from cacheslide_agents.bench.measure import Encode
from cacheslide_agents.bench.runner import Progress, silent, token_limits
from cacheslide_agents.bench.studies.decoupling import drop_page_cache
from cacheslide_agents.bench.studies.host import Host, Spent
from cacheslide_agents.bench.task_data import AGENTS
from cacheslide_agents.bench.workloads import Limits
from cacheslide_agents.bench.workloads.chains import chains
from cacheslide_agents.chunks import EncodedPrompt, Role
from cacheslide_agents.errors import DataError
from cacheslide_agents.pages import EVICTIONS, PAGE_TOKENS, Eviction, SlideStore
from cacheslide_agents.policies import CacheSlide, Recompute
from cacheslide_agents.prompt.chat import ChatEncoder

SESSIONS = (4, 8, 16)
GEOMETRY = (30, 1, 16)
"""Layers, KV heads, head size of the random keys and values, float32."""
TRUE_TOKEN_BYTES = 30 * 3 * 64 * 2 * 4
"""Of SmolLM2-135M in float32: what `GEOMETRY` stands for."""


@dataclass(frozen=True)
class Agent:
    """One session: its prompts in order, tokenised."""

    name: str
    task: str
    prompts: tuple[EncodedPrompt, ...]


def run(
    backend: Backend,
    data: Path,
    *,
    save: Callable[[Mapping[str, Any]], None],
    progress: Progress = silent,
    sessions: Sequence[int] = SESSIONS,
    limit: int = 20,
    seed: int = 0,
    max_prompt_tokens: int = 4096,
    geometry: tuple[int, int, int] = GEOMETRY,
    folder: str | None = None,
    earlier: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """`limit` turns of every agent. The stores lie in `folder` (default: as `TMPDIR` says)."""
    encode = ChatEncoder(backend.tokenizer).encode
    limits = token_limits(backend, encode, max_prompt_tokens)
    agents = _agents(encode, data, limits, max(sessions), turns=limit, seed=seed)
    if earlier is None:  # runs that stand side by side were simulated alike
        simulated = _simulated(geometry, _row_seconds(backend, agents[0].prompts[0]))
    else:
        simulated = dict(earlier["simulated"])
    runs: list[dict[str, Any]] = list((earlier or {}).get("runs", []))
    done = {each["sessions"] for each in runs}
    found = {"model": backend.model_id, "turns": limit, "simulated": simulated, "runs": runs}
    steps = len(sessions) * (1 + len(EVICTIONS))
    for number, count in enumerate(sessions):
        if count not in done:
            step = number * (1 + len(EVICTIONS))

            def note(part: int, label: str, step: int = step, count: int = count) -> None:
                progress(step + part, steps, f"{count} sessions, {label}")

            runs.append(_run(agents[:count], geometry, simulated["row_s"], folder, note))
            save(found)
    return found


def _simulated(geometry: tuple[int, int, int], row_s: float) -> dict[str, Any]:
    """`row_s`: seconds of one row of the true model, which the narrower one gets its share of."""
    layers, kv_heads, head_dim = geometry
    scale = 8 * layers * kv_heads * head_dim / TRUE_TOKEN_BYTES
    return {
        "keys_and_values": "random float32",
        "geometry": {"layers": layers, "kv_heads": kv_heads, "head_dim": head_dim},
        "scale": scale,
        "computing": "slept: active rows x row_s",
        "row_s": scale * row_s,
    }


def _run(
    agents: Sequence[Agent],
    geometry: tuple[int, int, int],
    row_s: float,
    folder: str | None,
    note: Callable[[int, str], None],
) -> dict[str, Any]:
    """First everything in memory, for the size of the working set; then each eviction."""
    token_bytes = 8 * geometry[0] * geometry[1] * geometry[2]
    most = sum(len(prompt.ids) + PAGE_TOKENS for agent in agents for prompt in agent.prompts)
    with SlideStore(most * token_bytes) as store:
        _drive(Host(store, geometry, row_s=0.0), agents)
        held = int(store.metrics()["memory_bytes"])
    note(1, "all in memory")
    budget = held // 4
    figures: dict[str, dict[str, float]] = {}
    for part, eviction in enumerate(EVICTIONS, start=2):
        figures[eviction.name] = _under(eviction, budget, agents, geometry, row_s, folder)
        note(part, eviction.name)
    slide, through = figures["slide"], figures["lru_write_through"]
    return {
        "sessions": len(agents),
        "working_set_bytes": held,
        "budget_bytes": budget,
        **figures,
        "bytes_ratio": _ratio(through["bytes_written"], slide["bytes_written"]),
        "wait_ratio": _ratio(through["wait_s"], slide["wait_s"]),
        "bytes_held": _held(agents, held, token_bytes),
    }


def _under(
    eviction: Eviction,
    budget: int,
    agents: Sequence[Agent],
    geometry: tuple[int, int, int],
    row_s: float,
    folder: str | None,
) -> dict[str, float]:
    with (
        TemporaryDirectory(dir=folder) as path,
        SlideStore(budget, path, eviction=eviction) as store,
    ):
        spent = _drive(Host(store, geometry, row_s), agents, lambda: drop_page_cache(Path(path)))
        counted = store.metrics()
    return {
        "bytes_written": counted["ssd_write_bytes"],
        "bytes_dirtied": counted["dirtied_bytes"],
        "kernel_write_bytes": counted.get("kernel_write_bytes", 0.0),
        "ssd_read_bytes": counted["ssd_read_bytes"],
        "hit_rate": spent.reused_tokens / spent.prompt_tokens,
        "recomputed_tokens": spent.active_tokens,
        "fallbacks": spent.fallbacks,
        "wait_s": spent.load_wait_s + spent.put_wait_s,
        "load_wait_s": spent.load_wait_s,
        "put_wait_s": spent.put_wait_s,
        "total_s": spent.total_s,
    }


def _drive(
    host: Host, agents: Sequence[Agent], between: Callable[[], None] = lambda: None
) -> Spent:
    """One turn of every agent, then the next of every agent."""
    spent = Spent()
    for turn in range(len(agents[0].prompts)):
        for agent in agents:
            between()
            spent += host.turn(agent.name, agent.task, agent.prompts[turn])
    return spent


def _agents(
    encode: Encode, data: Path, limits: Limits, count: int, *, turns: int, seed: int
) -> list[Agent]:
    """The three tasks' sessions in turn, each from the `seed`-th of its task on."""
    found: list[Agent] = []
    sources: list[Iterator[Any]] = [
        islice(chains(task, data, limits, turns=turns), seed, None) for task in AGENTS
    ]
    while len(found) < count and sources:
        source = sources.pop(0)
        chain = next(source, None)
        if chain is not None:
            prompts = tuple(map(encode, chain.prompts))
            found.append(Agent(chain.id, chain.task, prompts))
            sources.append(source)
    if len(found) < count:
        raise DataError(
            f"{data} has {len(found)} sessions of {turns} turns, not {count}; lower the limit"
        )
    return found


def _row_seconds(backend: Backend, prompt: EncodedPrompt) -> float:
    """What one token of a dense prefill takes; the second of two runs."""
    request = GenerationRequest(prompt.ids, policy=Recompute(), retain=False)
    receipts = [backend.score(request, prompt.ids[:1]).receipt for _ in range(2)]
    return receipts[-1].compute_s / len(prompt.ids)


def _held(agents: Sequence[Agent], store_bytes: int, token_bytes: int) -> dict[str, float]:
    """Store and working memory, ours and Prompt Cache's, with nothing evicted.

    Prompt Cache stores every reuse chunk once, computed alone: `live` counts those of the agents'
    last prompts, `all` every one it ever met. It works at schema positions: a request takes the
    longest value of each of its update chunks.
    """
    last = [agent.prompts[-1] for agent in agents]
    every = [prompt for agent in agents for prompt in agent.prompts]
    longest = max(len(prompt.ids) for prompt in every)
    ours = store_bytes + longest * token_bytes
    slots: dict[tuple[str, str], int] = {}
    for prompt in every:
        for span in prompt.spans:
            if span.role is Role.RECOMPUTE:
                place = (prompt.task, span.id)
                slots[place] = max(slots.get(place, 0), len(span))
    working = max(
        sum(max(len(span), slots.get((p.task, span.id), 0)) for span in p.spans) for p in every
    )
    live, whole = ((_chunk_tokens(prompts) + working) * token_bytes for prompts in (last, every))
    return {
        "ours": ours,
        "prompt_cache_live": live,
        "prompt_cache_all": whole,
        "ratio_live": live / ours,
        "ratio_all": whole / ours,
        "mean_prompt_tokens": fmean(len(prompt.ids) for prompt in every),
    }


def _chunk_tokens(prompts: Sequence[EncodedPrompt]) -> int:
    """Tokens of the distinct reuse chunks that are worth taking."""
    least = CacheSlide().min_run
    lengths = {
        (prompt.task, span.digest): len(span)
        for prompt in prompts
        for span in prompt.spans
        if span.role is Role.REUSE and len(span) >= least
    }
    return sum(lengths.values())


def _ratio(mine: float, other: float) -> float | None:
    return mine / other if other else None
