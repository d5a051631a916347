"""Loading ahead in the torch backend: whatever arrives first, the answer is that of inline loading.

The store is made slow or broken, so that corrections really come before their loads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Condition
from time import sleep
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cacheslide_agents.backend import GenerationRequest, Receipt, Sampling, Scores
from cacheslide_agents.errors import PageError, RequestError
from cacheslide_agents.pages import ContextKey, LayerKV, MemoryStore, StoredContext, TokenRange
from cacheslide_agents.pages.slots import SlotMap
from cacheslide_agents.policies import CacheSlide, Policy
from cacheslide_agents.selection import Boundary, LayerSelector
from torch_cacheslide import TorchBackend

TOKENS = 240
CORRECTING = CacheSlide(selector=Boundary(16, min_run=16), may_decline=False)


class HeldStore(MemoryStore):
    """`hold(layer)` is called before every load: it may delay it or fail."""

    hold: Callable[[int], object] = staticmethod(lambda layer: None)

    def load(
        self, context: StoredContext, layer: int, ranges: Sequence[TokenRange] | None = None
    ) -> LayerKV:
        self.hold(layer)
        return super().load(context, layer, ranges)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, support: Callable[[str], ModuleType]) -> Path:
    written: Path = support("tiny_models").write_model(
        tmp_path_factory.mktemp("tiny"),
        num_hidden_layers=4,
        max_position_embeddings=1024,
        initializer_range=0.3,
    )
    return written


def prompts(seed: int = 0) -> tuple[list[int], list[int]]:
    """A prompt, and the same with another middle, longer by 9 tokens."""
    drawn = np.random.default_rng(seed).integers(3, 250, TOKENS + 50).tolist()
    head, old, new, tail = drawn[:60], drawn[60:90], drawn[90:129], drawn[129:]
    return [*head, *old, *tail], [*head, *new, *tail]


@contextmanager
def opened(folder: Path, **options: Any) -> Iterator[tuple[TorchBackend, HeldStore]]:
    store = HeldStore(1 << 28)
    backend = TorchBackend(str(folder), device="cpu", store=store, **options)
    yield backend, store
    backend.close()


def chain(backend: TorchBackend, policy: Policy) -> tuple[list[Receipt], Scores]:
    """Three turns, each cached for the next, and scores of a fourth: it takes from the third."""
    first, second = prompts()
    third = [*second[:200], *first[60:100], *second[200:]]
    receipts: list[Receipt] = []
    for ids in (first, second, third):
        request = GenerationRequest(
            ids, policy=policy, sampling=Sampling(max_tokens=40, ignore_eos=True)
        )
        *_, last = backend.generate(request)
        assert last.receipt is not None
        receipts.append(last.receipt)
    request = GenerationRequest([*third[:150], *first[:5], *third[150:]], policy=policy)
    return receipts, backend.score(request, first[:60])


def stored(backend: TorchBackend) -> list[Tensor]:
    """Keys and values of every stored context, layer by layer."""
    key = ContextKey(backend.fingerprint, "default", "default")
    return [
        part
        for context in backend.store.find(key)
        for layer in range(backend.layers)
        for part in backend.store.load(context, layer)
    ]


POLICIES: dict[str, Policy] = {
    "static": CORRECTING,
    "paper": CacheSlide.paper(),
    "narrow": CacheSlide.paper(fusion="replace", gate=None),
}
Expected = tuple[list[Receipt], Scores, list[Tensor]]


@pytest.fixture(scope="module")
def inline(folder: Path) -> dict[str, Expected]:
    """What loading inline answers and stores, by policy."""
    found: dict[str, Expected] = {}
    for name, policy in POLICIES.items():
        with opened(folder, prefetch=0, decoupling=False) as (backend, _):
            found[name] = (*chain(backend, policy), stored(backend))
    return found


def assert_same(got: Expected, expected: Expected) -> None:
    """Outcomes and work alike, log-probabilities within 2e-4, stored numbers within 1e-4."""
    for mine, theirs in zip(got[0], expected[0], strict=True):
        assert (mine.outcome, mine.active_tokens) == (theirs.outcome, theirs.active_tokens)
    np.testing.assert_allclose(got[1].logprobs, expected[1].logprobs, atol=2e-4)
    torch.testing.assert_close(got[2], expected[2], atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("decoupling", ["off", "late", "slots"])
def test_loading_ahead_answers_and_stores_what_inline_loading_does(
    folder: Path, inline: dict[str, Expected], name: str, decoupling: str
) -> None:
    with opened(folder, prefetch=2, decoupling=decoupling) as (backend, store):
        store.hold = lambda layer: sleep(0.002)
        answered = chain(backend, POLICIES[name])
        store.hold = lambda layer: None
        assert_same((*answered, stored(backend)), inline[name])


@pytest.mark.parametrize("name", ["static", "narrow"])
def test_corrections_that_come_before_their_load_go_to_fresh_slots(
    folder: Path, inline: dict[str, Expected], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Loads are held back until the slot map has moved their layer, in every layer with any."""
    moved: set[int] = set()
    state = Condition()
    move = SlotMap.move

    def note(self: SlotMap, layer: int) -> None:
        move(self, layer)
        with state:
            moved.add(layer)
            state.notify_all()

    def hold(layer: int) -> None:
        with state:
            if backend.layers - 1 in moved:
                moved.clear()  # the next turn
            assert layer < first or state.wait_for(lambda: layer in moved, timeout=60)

    narrow = POLICIES[name].selector
    first = narrow.layer + 1 if isinstance(narrow, LayerSelector) else 0
    monkeypatch.setattr(SlotMap, "move", note)
    with opened(folder, prefetch=1, decoupling="slots") as (backend, store):
        store.hold = hold
        answered = chain(backend, POLICIES[name])
        store.hold = lambda layer: None
        assert_same((*answered, stored(backend)), inline[name])
    assert moved == set(range(first, backend.layers))


def test_a_load_that_won_leaves_corrections_at_home(folder: Path) -> None:
    first, second = prompts()
    with opened(folder, prefetch=0, decoupling="slots") as (backend, _), torch.inference_mode():
        runtime = backend._runtime
        with runtime.prefill(GenerationRequest(first), CORRECTING, 4) as turn:
            runtime.remember(turn, [])
        with runtime.prefill(GenerationRequest(second), CORRECTING, 4) as turn:
            assert turn.cache.slots is not None
            assert list(turn.cache.slots.moved_layers) == []


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_page_that_cannot_be_loaded_is_answered_densely_and_named(
    folder: Path, prefetch: int
) -> None:
    def hold(layer: int) -> None:
        if layer == 2:
            raise PageError("layer 2 is torn")

    first, second = prompts()
    with opened(folder, prefetch=prefetch) as (backend, store):
        backend.warm(GenerationRequest(first, policy=CORRECTING))
        store.hold = hold
        scores = backend.score(GenerationRequest(second, policy=CORRECTING), first[:4])
        dense = backend.score(GenerationRequest(second, namespace="fresh"), first[:4])
    assert scores.receipt.outcome == "fallback"
    assert scores.receipt.reason == "PageError: layer 2 is torn"
    np.testing.assert_array_equal(scores.logprobs, dense.logprobs)


@pytest.mark.parametrize("prefetch", [0, 1])
def test_the_receipt_tells_loading_waiting_and_computing_apart(folder: Path, prefetch: int) -> None:
    first, second = prompts()
    with opened(folder, prefetch=prefetch) as (backend, store):
        backend.warm(GenerationRequest(first, policy=CORRECTING))
        store.hold = lambda layer: sleep(0.01)
        receipt = backend.score(GenerationRequest(second, policy=CORRECTING), first[:1]).receipt
    assert receipt.load_s >= 4 * 0.01
    assert receipt.wait_s > 0.0
    assert receipt.plan_s + receipt.wait_s + receipt.compute_s <= receipt.ttft_s
    assert prefetch or receipt.wait_s == receipt.load_s


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"prefetch": -1}, "prefetch=-1 must be at least 0 layers"),
        ({"decoupling": "never"}, "decoupling='never' must be a bool"),
        ({"refresh": "always"}, "refresh='always' must be 'corrected' or 'never'"),
        ({"guard_every": 0}, "guard_every=0 must be a whole number of at least 1"),
        ({"guard_every": 2, "guard_budget": 0.0}, "guard_budget=0.0 must be finite and above 0"),
    ],
)
def test_options_that_make_no_sense_are_refused_before_a_model_is_loaded(
    options: dict[str, Any], told: str
) -> None:
    with pytest.raises(RequestError, match=told):
        TorchBackend("no-such-model", **options)
