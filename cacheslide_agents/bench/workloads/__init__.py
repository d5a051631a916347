"""Agent turns from real data: four workloads, one way to choose rows from them.

In: a task name, the data folder and token limits. Out: `Turn`s in an order that `seed` decides.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import islice, zip_longest
from pathlib import Path
from random import Random

from cacheslide_agents.bench.workloads import append, memgpt, reflexion, swe_agent
from cacheslide_agents.bench.workloads.base import Draft, Limits, Turn, cut_middle
from cacheslide_agents.errors import DataError

__all__ = ["TASKS", "Draft", "Limits", "Turn", "cut_middle", "load_turns"]

TASKS = {
    "reflexion": reflexion.drafts,
    "memgpt": memgpt.drafts,
    "swe_agent": swe_agent.drafts,
    "append": append.drafts,
}


def load_turns(
    task: str,
    data: str | Path,
    limits: Limits,
    *,
    limit: int | None = None,
    seed: int = 0,
) -> list[Turn]:
    """The first `limit` turns (default: all) of `task` that meet `limits`, in the order of `seed`.

    So a run of 8 rows measures the first 8 of a run of 16. `append` deals its three agents' turns
    in equal shares. `DataError` for an unknown task, bad data, or limits that no turn meets.
    """
    if task not in TASKS:
        raise DataError(f"no workload named {task!r}; known: {', '.join(TASKS)}")
    if limit is not None and limit < 1:
        raise DataError(f"limit={limit} must be at least 1")
    turns = list(islice(_dealt(TASKS[task](Path(data), limits), seed), limit))
    if not turns:
        raise DataError(
            f"no {task!r} turn in {data} fits {limits.max_prompt_tokens} tokens; "
            "raise --max-prompt-tokens"
        )
    return turns


def _dealt(drafts: list[Draft], seed: int) -> Iterator[Turn]:
    """Every agent's turns shuffled, then one of each in turn. They are built as they are asked."""
    groups: dict[str, list[Draft]] = defaultdict(list)
    for draft in drafts:
        groups[draft.task].append(draft)
    for group in groups.values():
        Random(seed).shuffle(group)
    for round_ in zip_longest(*map(_built, groups.values())):
        yield from (turn for turn in round_ if turn is not None)


def _built(drafts: list[Draft]) -> Iterator[Turn]:
    for draft in drafts:
        if (turn := draft.build()) is not None:
            yield turn
