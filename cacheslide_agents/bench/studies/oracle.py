"""The best a selector could know: which reused tokens the change really alters, over all layers.

In: a populated turn and a backend whose page store can be read. Out: the reused positions, ordered
by the deviation of their cached keys and values from those of a dense run of the same prompt.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cacheslide_agents.backend import Backend, GenerationRequest
from cacheslide_agents.bench.measure import Populated
from cacheslide_agents.chunks import EncodedPrompt
from cacheslide_agents.errors import BackendError
from cacheslide_agents.pages.base import ContextKey, PageStore, StoredContext
from cacheslide_agents.policies import Prefix
from cacheslide_agents.prompt.align import align


@runtime_checkable
class KeepsContexts(Protocol):
    """A backend whose stored keys and values can be read in this process."""

    @property
    def store(self) -> PageStore: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def layers(self) -> int: ...


def deviating_positions(backend: Backend, populated: Populated) -> npt.NDArray[np.int64]:
    """Reused prompt positions after the first change, most deviating first; ties by position.

    Runs turn t densely once more, in a namespace of its own.
    """
    if not isinstance(backend, KeepsContexts):
        raise BackendError(f"the oracle must read stored keys, which {backend.model_id} keeps away")
    apart = replace(populated, namespace=f"{populated.namespace}-dense")
    prompt = populated.prompt
    backend.warm(GenerationRequest.of(prompt, namespace=apart.namespace, policy=Prefix()))
    cached = _stored(backend, populated.namespace, populated.previous)
    dense = _stored(backend, apart.namespace, prompt)
    runs = align(prompt.ids, populated.previous.ids).runs
    new = np.concatenate([np.arange(run.start, run.stop) for run in runs])
    old = np.concatenate([np.arange(run.cached_start, run.cached_stop) for run in runs])
    after = (new >= populated.first_change) & (new < len(prompt.ids) - 1)
    new, old = new[after], old[after]
    deviation = _deviation(backend, dense, new, cached, old)
    order: npt.NDArray[np.int64] = new[np.argsort(-deviation, kind="stable")]
    return order


def _stored(backend: KeepsContexts, namespace: str, prompt: EncodedPrompt) -> StoredContext:
    key = ContextKey(backend.fingerprint, namespace, prompt.task)
    wanted = np.asarray(prompt.ids)
    for context in backend.store.find(key):
        if np.array_equal(context.ids[: len(wanted)], wanted):
            return context
    raise BackendError(
        f"the store does not hold the prompt of namespace {namespace!r}; raise its byte budget"
    )


def _deviation(
    backend: KeepsContexts,
    dense: StoredContext,
    new: npt.NDArray[np.int64],
    cached: StoredContext,
    old: npt.NDArray[np.int64],
) -> npt.NDArray[np.float64]:
    """[tokens]: squared deviation of K and of V, each relative to its layer's mean squared norm."""
    total = np.zeros(len(new))
    for layer in range(backend.layers):
        pairs = zip(
            backend.store.load(dense, layer), backend.store.load(cached, layer), strict=True
        )
        for fresh, stale in pairs:
            now = _rows(fresh, new)
            gap = (now - _rows(stale, old)).square().sum(dim=(0, 2))
            total += (gap / now.square().sum(dim=(0, 2)).mean()).cpu().numpy()
    return total


def _rows(values: Tensor, rows: npt.NDArray[np.int64]) -> Tensor:
    """[kv_heads, rows, head_dim] in float64."""
    return values.index_select(1, torch.from_numpy(rows).to(values.device)).double()
