"""Two tensor-parallel ranks on vLLM: they choose the same tokens, and fall back together.

The reference is the engine of one rank. Ranks that computed different rows would not come out of
their next reduction.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any
from uuid import uuid4

import pytest
import torch

from cacheslide_agents.policies import CacheSlide, Recompute
from cacheslide_agents.policies.base import Policy
from cacheslide_agents.selection import Everything, KeyDeviation

POLICIES: dict[str, Policy] = {
    "default": CacheSlide(may_decline=False),
    "deviation": CacheSlide(selector=KeyDeviation(1, 0.26), may_decline=False),
    "everything": CacheSlide(selector=Everything(), may_decline=False),
}

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),  # vLLM's and its packages' own
]


@pytest.fixture
def backend(lab: ModuleType) -> Any:
    if torch.cuda.device_count() == 1:
        pytest.skip("two ranks need two devices")
    return lab.engine("ranks")


@pytest.fixture
def namespace() -> str:
    return uuid4().hex


def moved(backend: Any, lab: ModuleType, namespace: str, policy: Policy) -> Any:
    """The answer to a turn that moved, its context stored just before."""
    first, second = lab.turns(70, 600)
    lab.ask(backend, lab.request(first, policy, namespace=namespace, retain=True))
    return lab.ask(backend, lab.request(second, policy, namespace=namespace))


def dense(backend: Any, lab: ModuleType, namespace: str) -> Any:
    _, second = lab.turns(70, 600)
    return lab.ask(backend, lab.request(second, Recompute(), namespace=namespace))


@pytest.mark.parametrize("name", POLICIES)
def test_two_ranks_choose_and_answer_as_one_does(
    backend: Any, lab: ModuleType, namespace: str, name: str
) -> None:
    policy = POLICIES[name]
    ours = moved(backend, lab, namespace, policy)
    reference = moved(lab.engine("inside"), lab, namespace, policy)
    assert ours.receipt.outcome == reference.receipt.outcome == "partial"
    assert ours.receipt.active_tokens == reference.receipt.active_tokens
    assert ours.receipt.reused_tokens == reference.receipt.reused_tokens
    assert ours.receipt.compute_fraction == reference.receipt.compute_fraction
    assert ours.equals(reference)


def test_everything_recomputed_equals_stock_on_the_same_ranks(
    backend: Any, lab: ModuleType, namespace: str
) -> None:
    ours = moved(backend, lab, namespace, POLICIES["everything"])
    assert ours.equals(dense(backend, lab, namespace))


@pytest.mark.parametrize("name", ["default", "deviation"])
@pytest.mark.parametrize(
    ("harm", "reason"), [("lose_contexts", "PageError"), ("tear_pages", "torn page")]
)
def test_trouble_of_one_rank_has_both_fall_back(
    backend: Any, lab: ModuleType, namespace: str, name: str, harm: str, reason: str
) -> None:
    policy = POLICIES[name]
    first, second = lab.turns(70, 600)
    expected = dense(backend, lab, namespace)
    lab.ask(backend, lab.request(first, policy, namespace=namespace, retain=True))
    lab.on_ranks(backend, getattr(lab, harm))
    fallen = lab.ask(backend, lab.request(second, policy, namespace=namespace))
    lab.on_ranks(backend, lab.mend_pages)
    assert fallen.receipt.outcome == "fallback"
    assert reason in fallen.receipt.reason
    assert fallen.equals(expected)
    assert moved(backend, lab, uuid4().hex, policy).receipt.outcome == "partial"
