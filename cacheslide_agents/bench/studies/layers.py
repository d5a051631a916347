"""From layer to layer: do the tokens that deviate most in one layer deviate most in the next?

In: changed turns of a workload. Out: `curves` over layers (from 0), mean over turns. Deviation is
the squared distance of a reused token's cached keys from those of a dense run, keys taken without
positions; layer 0, whose keys do not depend on the context, has none.

| curve | at layer l |
| --- | --- |
| `rank correlation with the next layer` | Spearman's, of the deviations at l and l + 1 |
| `top 26 % shared with the next layer` | part of the most deviating tokens that stay so at l + 1 |
| `top 26 % shared with layer 1` | the same with layer 1, where WCA chooses once for all layers |
| `CKSim, cached with dense` | mean over heads and tokens of the cosine |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cacheslide_agents.backend import Backend
from cacheslide_agents.bench.runner import Progress, silent
from cacheslide_agents.bench.studies.curves import Figure, draw
from cacheslide_agents.bench.studies.kept_keys import ck_sim, kept_keys
from cacheslide_agents.bench.task_data import TaskData
from cacheslide_agents.chunks import EncodedPrompt, Run
from cacheslide_agents.errors import DataError
from cacheslide_agents.prompt.align import align

TOP = 0.26
"""Share of the reused tokens that the paper's WCA corrects."""
MIN_RUN = 16


def run(
    backend: Backend,
    data: Path,
    *,
    save: Callable[[Mapping[str, Any]], None],
    progress: Progress = silent,
    task: str = "reflexion",
    cope_model: str | None = None,
    limit: int = 4,
    seed: int = 0,
    max_prompt_tokens: int = 4096,
) -> dict[str, Any]:
    """`limit` turns of `task`; with `cope_model` also on the converted model."""
    started = perf_counter()
    source = TaskData.of(backend, data, limit=limit, seed=seed, max_prompt_tokens=max_prompt_tokens)
    return draw(
        backend,
        cope_model,
        source.pairs([task]),
        _turn,
        started=started,
        x="layer",
        y="similarity",
        save=save,
        progress=progress,
    )


def _turn(backend: Backend, old: EncodedPrompt, new: EncodedPrompt) -> Iterable[Figure]:
    """(curve, layer, value) of one turn."""
    runs = moved_runs(old, new)
    cached = kept_keys(backend, old, [(run.cached_start, run.cached_stop) for run in runs])
    dense = kept_keys(backend, new, [(run.start, run.stop) for run in runs])
    for layer, pair in enumerate(zip(cached, dense, strict=True)):
        yield "CKSim, cached with dense", layer, float(ck_sim(*pair).mean())
    deviations = [deviation(*pair) for pair in zip(cached, dense, strict=True)]
    yield from layer_curves(deviations)


def moved_runs(old: EncodedPrompt, new: EncodedPrompt) -> list[Run]:
    """What both prompts share behind the first change."""
    runs = align(new.ids, old.ids, min_run=MIN_RUN).runs
    behind = [run for run in runs if run.start or run.cached_start]
    if not behind:
        raise DataError("nothing is reused behind the change of this turn; choose another task")
    return behind


def deviation(cached: Tensor, dense: Tensor) -> Tensor:
    """[tokens]: squared distance of keys [kv_heads, tokens, head_dim], summed over heads."""
    return (dense - cached).double().square().sum(dim=(0, 2))


def layer_curves(deviations: Sequence[Tensor]) -> Iterable[Figure]:
    """Of deviations [tokens] of every layer, in order; layer 0 is left out."""
    behind = list(enumerate(deviations))[1:]
    chosen = {layer: _top(found) for layer, found in behind}
    for (layer, here), (following, there) in pairwise(behind):
        ranks = np.corrcoef(_ranks(here), _ranks(there))
        yield "rank correlation with the next layer", layer, float(ranks[0, 1])
        shared = _shared(chosen[layer], chosen[following])
        yield "top 26 % shared with the next layer", layer, shared
    for layer, _ in behind:
        yield "top 26 % shared with layer 1", layer, _shared(chosen[layer], chosen[1])


def _top(found: Tensor) -> set[int]:
    count = max(1, round(TOP * len(found)))
    return set(torch.argsort(found, descending=True, stable=True)[:count].tolist())


def _shared(one: set[int], other: set[int]) -> float:
    return len(one & other) / len(one)


def _ranks(found: Tensor) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Place of each token by its deviation; ties in order."""
    return np.argsort(np.argsort(found.numpy(), kind="stable"), kind="stable")
