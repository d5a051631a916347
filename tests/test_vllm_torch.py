"""The vLLM backend against the torch backend, the numerical reference: same rows, same numbers."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any
from uuid import uuid4

import numpy as np
import pytest

from cacheslide_agents.backend import GenerationRequest, Sampling
from cacheslide_agents.bench.metrics import kl_divergence
from cacheslide_agents.chunks import Role, Span
from cacheslide_agents.policies import CacheBlend, CacheSlide, Epic, Recompute
from cacheslide_agents.policies.base import Policy, Population
from cacheslide_agents.selection import Boundary, KeyDeviation
from torch_cacheslide import TorchBackend

POLICIES: dict[str, Policy] = {
    "default": CacheSlide(may_decline=False),
    "nothing": CacheSlide(selector=None, may_decline=False),
    "boundary": CacheSlide(selector=Boundary(16), may_decline=False),
    "deviation": CacheSlide(selector=KeyDeviation(1, 0.26), may_decline=False),
    "everything by deviation": CacheSlide(
        selector=KeyDeviation(1, 1.0, noise=0.0), may_decline=False
    ),
    "cache_blend": CacheBlend(),
    "cache_blend_context": CacheBlend(population=Population.CONTEXT),
    "epic": Epic(tokens=16),
}
FORCED = (7, 300, 12, 41)

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),  # vLLM's and its packages' own
]


@pytest.fixture(scope="module")
def vllm_backend(lab: ModuleType) -> Any:
    return lab.engine("inside")


@pytest.fixture(scope="module")
def torch_backend(lab: ModuleType, vllm_backend: Any) -> Iterator[TorchBackend]:
    backend = TorchBackend(lab.model_of(vllm_backend), dtype="float32")
    yield backend
    backend.close()


def request(ids: list[int], cut: int, policy: Policy, namespace: str) -> GenerationRequest:
    spans = (
        Span("head", Role.REUSE, 0, 100, "head"),
        Span("update", Role.RECOMPUTE, 100, cut, f"update{cut}"),
        Span("tail", Role.REUSE, cut, len(ids), "tail"),
    )
    return GenerationRequest(
        ids,
        spans,
        namespace,
        policy=policy,
        retain=False,
        sampling=Sampling(max_tokens=1),
    )


@pytest.mark.parametrize("name", POLICIES)
def test_both_backends_compute_the_same_rows_and_distributions(
    lab: ModuleType, vllm_backend: Any, torch_backend: TorchBackend, name: str
) -> None:
    policy, namespace = POLICIES[name], uuid4().hex
    first, second = lab.turns(60, 500)
    found = []
    for backend in (torch_backend, vllm_backend):
        backend.warm(request(first, 120, policy, namespace))
        found.append(backend.score(request(second, 137, policy, namespace), FORCED))
    reference, ours = found
    assert reference.receipt.outcome in {"hit", "partial"}
    assert ours.receipt.outcome == reference.receipt.outcome
    assert ours.receipt.active_tokens == reference.receipt.active_tokens
    assert ours.receipt.reused_tokens == reference.receipt.reused_tokens
    assert ours.receipt.compute_fraction == pytest.approx(reference.receipt.compute_fraction)
    assert ours.receipt.chunks == reference.receipt.chunks
    assert np.abs(ours.logprobs - reference.logprobs).max() < 5e-3
    assert kl_divergence(reference.logprobs, ours.logprobs) < 1e-6


def test_everything_chosen_on_the_way_equals_dense(lab: ModuleType, vllm_backend: Any) -> None:
    policy, namespace = POLICIES["everything by deviation"], uuid4().hex
    first, second = lab.turns(61, 700)
    dense = vllm_backend.score(request(second, 137, Recompute(), namespace), FORCED)
    vllm_backend.warm(request(first, 120, policy, namespace))
    found = vllm_backend.score(request(second, 137, policy, namespace), FORCED)
    assert found.receipt.outcome == "partial"
    assert np.abs(found.logprobs - dense.logprobs).max() < 5e-3
