"""Where reuse on vLLM must equal vLLM's own prefill, it does, in float32.

The reference is the same engine without our plan: `Recompute`, which vLLM prefills by itself.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any
from uuid import uuid4

import pytest

from cacheslide_agents.policies import CacheSlide, Prefix, Recompute
from cacheslide_agents.selection import Everything

REUSE = CacheSlide(may_decline=False)
NOTHING = CacheSlide(selector=None, may_decline=False)
ALL = CacheSlide(selector=Everything(), may_decline=False)
LENGTHS = (40, 150, 700, 1500)

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),  # vLLM's and its packages' own
]


@pytest.fixture(params=["inside", "outside"])
def backend(request: pytest.FixtureRequest, lab: ModuleType) -> Any:
    return lab.engine(request.param)


@pytest.fixture
def namespace() -> str:
    return uuid4().hex


def test_the_engine_reuses(backend: Any) -> None:
    assert backend.off == ""


@pytest.mark.parametrize("length", LENGTHS)
def test_a_first_prompt_is_answered_as_without_us(
    backend: Any, lab: ModuleType, namespace: str, length: int
) -> None:
    first, _ = lab.turns(length, length)
    dense = lab.ask(backend, lab.request(first, Recompute(), namespace=namespace))
    cold = lab.ask(backend, lab.request(first, REUSE, namespace=namespace))
    assert cold.receipt.outcome == "cold"
    assert cold.receipt.exact
    assert cold.equals(dense)


@pytest.mark.parametrize("length", LENGTHS)
def test_a_moved_prompt_that_is_all_recomputed_equals_stock(
    backend: Any, lab: ModuleType, namespace: str, length: int
) -> None:
    first, second = lab.turns(length, length)
    dense = lab.ask(backend, lab.request(second, Recompute(), namespace=namespace))
    lab.ask(backend, lab.request(first, REUSE, namespace=namespace, retain=True))
    lab.forget_prefixes(backend)
    again = lab.ask(backend, lab.request(second, ALL, namespace=namespace))
    head = length // 5 if length // 5 >= REUSE.min_run else 0
    assert again.receipt.outcome == "partial"
    assert again.receipt.reused_tokens == head
    assert again.equals(dense)


@pytest.mark.parametrize("length", LENGTHS)
def test_an_unchanged_prompt_is_loaded_and_equals_stock(
    backend: Any, lab: ModuleType, namespace: str, length: int
) -> None:
    first, _ = lab.turns(length, length)
    dense = lab.ask(backend, lab.request(first, Recompute(), namespace=namespace))
    lab.ask(backend, lab.request(first, REUSE, namespace=namespace, retain=True))
    lab.forget_prefixes(backend)
    same = lab.ask(backend, lab.request(first, REUSE, namespace=namespace))
    assert same.receipt.outcome == "hit"
    assert same.receipt.exact
    assert same.receipt.active_tokens == 1
    assert same.equals(dense)


@pytest.mark.parametrize("length", LENGTHS)
def test_a_prompt_whose_context_is_gone_is_prefilled_by_us_and_equals_stock(
    lab: ModuleType, namespace: str, length: int
) -> None:
    backend = lab.engine("inside")
    first, second = lab.turns(length, length)
    dense = lab.ask(backend, lab.request(second, Recompute(), namespace=namespace))
    lab.ask(backend, lab.request(first, REUSE, namespace=namespace, retain=True))
    lab.working(backend).store.clear()
    fallen = lab.ask(backend, lab.request(second, NOTHING, namespace=namespace))
    assert fallen.receipt.outcome == "fallback"
    assert "PageError" in fallen.receipt.reason
    assert fallen.receipt.active_tokens == len(second)
    assert fallen.equals(dense)


def test_a_moved_prompt_computes_few_tokens(backend: Any, lab: ModuleType, namespace: str) -> None:
    first, second = lab.turns(9, 1500)
    lab.ask(backend, lab.request(first, REUSE, namespace=namespace, retain=True))
    moved = lab.ask(backend, lab.request(second, REUSE, namespace=namespace))
    assert not moved.receipt.exact
    assert moved.receipt.active_tokens < 0.15 * len(second)
    assert moved.receipt.reused_tokens + moved.receipt.active_tokens == len(second)


@pytest.mark.parametrize("count", [3, 8])
def test_several_at_once_and_among_stock_requests_equal_stock(
    backend: Any, lab: ModuleType, namespace: str, count: int
) -> None:
    pairs = [lab.turns(100 + each, 200 + 90 * each) for each in range(count)]
    dense = [
        lab.ask(backend, lab.request(second, Recompute(), namespace=namespace))
        for _, second in pairs
    ]
    lab.ask_together(
        backend,
        [lab.request(first, REUSE, namespace=namespace, retain=True) for first, _ in pairs],
    )
    ours = [lab.request(second, ALL, namespace=namespace) for _, second in pairs]
    stock = [lab.request(second, Recompute(), namespace=namespace) for _, second in pairs]
    answers = lab.ask_together(backend, [*ours, *stock])
    assert all(answer.receipt.outcome == "partial" for answer in answers[:count])
    for answer, reference in zip(answers, dense * 2, strict=True):
        assert answer.equals(reference)


def test_a_stock_request_after_approximate_reuse_gets_stock_numbers(
    backend: Any, lab: ModuleType, namespace: str
) -> None:
    first, second = lab.turns(11, 900)
    dense = lab.ask(backend, lab.request(second, Recompute(), namespace=namespace))
    lab.ask(backend, lab.request(first, REUSE, namespace=namespace, retain=True))
    moved = lab.ask(backend, lab.request(second, NOTHING, namespace=namespace))
    after = lab.ask(backend, lab.request(second, Prefix(), namespace=uuid4().hex))
    assert not moved.equals(dense), "the test needs reuse that can be told from dense"
    assert after.equals(dense)


@pytest.mark.parametrize("retain", [True, False])
def test_vllms_own_prefix_cache_is_used_and_heeds_retain(
    lab: ModuleType, namespace: str, retain: bool
) -> None:
    backend = lab.engine("inside")
    first, _ = lab.turns(13 + retain, 500)
    lab.forget_prefixes(backend)
    request = lab.request(first, REUSE, namespace=namespace, retain=retain)
    once, again = (lab.ask(backend, request) for _ in range(2))
    assert again.equals(once)
    assert again.receipt.active_tokens == (len(first) - 4 * lab.BLOCK if retain else len(first))


def test_what_was_reused_is_kept_bit_by_bit_for_the_next_turn(
    lab: ModuleType, namespace: str
) -> None:
    backend = lab.engine("inside")
    first, second = lab.turns(12, 600)
    lab.ask(backend, lab.request(first, NOTHING, namespace=namespace, retain=True))
    lab.ask(backend, lab.request(second, NOTHING, namespace=namespace, retain=True))
    store = lab.working(backend).store
    newer, older = store.find(lab.key_of(backend, namespace))
    head, old_update, new_update = 120, 20, 37
    tail = len(first) - head - old_update - 1  # without the last token, which is computed anew
    for layer in range(backend.layers):
        for new, old in zip(store.load(newer, layer), store.load(older, layer), strict=True):
            moved = new[:, head + new_update :][:, :tail]
            assert moved.equal(old[:, head + old_update :][:, :tail])


def test_a_preempted_request_is_answered_as_alone(lab: ModuleType, namespace: str) -> None:
    """The engine has blocks for three prompts, but not for their answers as well."""
    backend = lab.engine("outside")
    pairs = [lab.turns(200 + each, 880) for each in range(3)]
    alone = [
        lab.ask(backend, lab.request(second, Recompute(), namespace=namespace, max_tokens=200))
        for _, second in pairs
    ]
    for first, _ in pairs:
        lab.ask(backend, lab.request(first, REUSE, namespace=namespace, retain=True))
    before = lab.preemptions(backend)
    answers = lab.ask_together(
        backend,
        [lab.request(second, ALL, namespace=namespace, max_tokens=200) for _, second in pairs],
    )
    assert lab.preemptions(backend) > before
    for answer, reference in zip(answers, alone, strict=True):
        assert answer.receipt.outcome == "partial"
        assert answer.equals(reference)
