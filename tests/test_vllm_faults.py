"""Whatever goes wrong inside reuse on vLLM: answered densely, engine alive, receipt says why."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any
from uuid import uuid4

import pytest
import torch

from cacheslide_agents.policies import CacheSlide, Recompute
from cacheslide_agents.selection import Affinity, KeyCosine, KeyDeviation, Tail

REUSE = CacheSlide(may_decline=False)

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),  # vLLM's and its packages' own
]


@pytest.fixture(scope="module")
def backend(lab: ModuleType) -> Any:
    return lab.engine("inside")


@pytest.fixture
def namespace() -> str:
    return uuid4().hex


class Case:
    """A prompt whose context is stored, and the dense answer to its next turn."""

    def __init__(self, backend: Any, lab: ModuleType, namespace: str) -> None:
        self.backend, self.lab, self.namespace = backend, lab, namespace
        first, self.second = lab.turns(5, 500)
        self.dense = self.ask(Recompute())
        lab.ask(backend, lab.request(first, REUSE, namespace=namespace, retain=True))

    def ask(self, policy: Any = REUSE, **options: Any) -> Any:
        asked = self.lab.request(self.second, policy, namespace=self.namespace, **options)
        return self.lab.ask(self.backend, asked)


@pytest.fixture
def case(backend: Any, lab: ModuleType, namespace: str) -> Case:
    return Case(backend, lab, namespace)


def assert_dense(answer: Any, case: Case, reason: str) -> None:
    assert answer.receipt.outcome == "fallback"
    assert reason in answer.receipt.reason
    assert answer.receipt.reused_tokens == 0
    assert answer.equals(case.dense)


def raising(message: str) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError(message)

    return fail


def test_nan_in_a_page_is_noticed(
    case: Case, lab: ModuleType, backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = lab.working(backend).store
    sound = store.load

    def poisoned(context: Any, layer: int, *rest: Any) -> Any:
        keys, values = sound(context, layer, *rest)
        if layer == 2:
            values = values.clone()
            values[0, 3, 0] = torch.nan
        return keys, values

    monkeypatch.setattr(store, "load", poisoned)
    assert_dense(case.ask(), case, "NonFiniteError")
    monkeypatch.undo()
    assert case.ask().receipt.outcome == "cold"  # what is not finite is not asked again


def test_a_page_that_cannot_be_read(
    case: Case, lab: ModuleType, backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lab.working(backend).store, "load", raising("torn page"))
    assert_dense(case.ask(), case, "torn page")


def test_a_selector_that_raises(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tail, "select", raising("no tail"))
    assert_dense(case.ask(), case, "no tail")


@pytest.mark.parametrize("wanted", ["removed_keys", "new_keys"])
def test_a_selector_that_asks_in_mid_pass_for_keys_there_are_not(
    case: Case, monkeypatch: pytest.MonkeyPatch, wanted: str
) -> None:
    """The cached keys of the reused tokens are there; others must not pass for them."""
    ask = KeyDeviation.rank

    def rank(self: Any, view: Any, new_keys: Any, cached_keys: Any) -> Any:
        getattr(view, wanted)(self.layer)
        return ask(self, view, new_keys, cached_keys)

    monkeypatch.setattr(KeyDeviation, "rank", rank)
    policy = CacheSlide(selector=KeyDeviation(), may_decline=False)
    assert_dense(case.ask(policy), case, "removed or new keys of layer 1")


def test_one_request_in_trouble_does_not_disturb_those_beside_it(
    case: Case, lab: ModuleType, backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Case(backend, lab, uuid4().hex)
    store = lab.working(backend).store
    sound = store.load

    def load(context: Any, *rest: Any) -> Any:
        if context.key.namespace == case.namespace:
            raise RuntimeError("torn page")
        return sound(context, *rest)

    monkeypatch.setattr(store, "load", load)
    requests = [lab.request(each.second, REUSE, namespace=each.namespace) for each in (case, other)]
    troubled, untroubled = lab.ask_together(backend, requests)
    assert_dense(troubled, case, "torn page")
    assert untroubled.receipt.outcome == "partial"


def test_a_prefill_that_raises_once_is_done_again_densely(
    case: Case, lab: ModuleType, backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill = lab.working(backend)._prefill
    sound, calls = prefill.run, []

    def run(*given: Any) -> None:
        calls.append(given)
        if len(calls) == 1:
            raise RuntimeError("kernel failed")
        sound(*given)

    monkeypatch.setattr(prefill, "run", run)
    assert_dense(case.ask(), case, "kernel failed")


def test_a_prefill_that_always_raises_is_left_to_vllm(
    case: Case, lab: ModuleType, backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lab.working(backend)._prefill, "run", raising("kernel failed"))
    assert_dense(case.ask(), case, "kernel failed")


def test_a_worker_hook_that_raises_is_left_to_vllm(
    case: Case, lab: ModuleType, backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lab.working(backend), "carry_out", raising("hook failed"))
    answer = case.ask()
    assert answer.receipt.outcome == "fallback"
    assert answer.equals(case.dense)


@pytest.mark.parametrize("hook", ["arrived", "matched", "admitted", "learn"])
def test_a_scheduler_hook_that_raises_leaves_the_engine_alive(
    case: Case, lab: ModuleType, backend: Any, monkeypatch: pytest.MonkeyPatch, hook: str
) -> None:
    monkeypatch.setattr(lab.scheduling(backend), hook, raising("hook failed"))
    answer = case.ask()
    monkeypatch.undo()
    assert answer.receipt.outcome == "fallback" or hook == "learn"
    assert answer.equals(case.dense) or hook == "learn"
    assert case.ask(Recompute()).equals(case.dense)
    assert case.ask().receipt.outcome == "partial"


def test_a_store_that_refuses_costs_only_the_next_turn(
    lab: ModuleType, backend: Any, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = lab.turns(6, 400)
    with monkeypatch.context() as patched:
        patched.setattr(lab.working(backend).store, "put", raising("disk full"))
        lab.ask(backend, lab.request(first, REUSE, namespace=namespace, retain=True))
        lab.settle(backend)
    answer = lab.ask(backend, lab.request(second, REUSE, namespace=namespace))
    assert answer.receipt.outcome == "cold"


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        (CacheSlide(selector=Affinity(0.1, (KeyCosine(1),)), may_decline=False), "asks for keys"),
        (CacheSlide.paper(gate=None), "from layer to layer"),
        (CacheSlide.paper(), "from layer to layer"),
    ],
)
def test_a_policy_that_is_not_handled_is_answered_densely_and_named(
    case: Case, policy: CacheSlide, reason: str
) -> None:
    assert_dense(case.ask(policy), case, reason)
