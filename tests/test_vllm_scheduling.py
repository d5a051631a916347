"""The scheduler's side without an engine: salts, siblings, the throttle, what is kept and lost."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from cacheslide_agents.backend import GenerationRequest
from cacheslide_agents.policies import CacheSlide, Recompute
from cacheslide_agents.policies.base import Policy
from cacheslide_agents.policies.cost import CostModel
from cacheslide_agents.selection import KeyDeviation
from vllm_cacheslide.wire import PARAMETER, Annotation

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own, at its import

REUSE = CacheSlide(selector=None, may_decline=False)
NUMBERS = count()


class Request:
    """What the scheduler's side reads and writes of vLLM's request."""

    def __init__(self, ids: list[int], policy: Policy, **options: Any) -> None:
        said = GenerationRequest(ids, policy=policy, **options)
        self.request_id = f"engine-{next(NUMBERS)}"
        self.kv_transfer_params: Any = Annotation.of(said, policy).to_params()
        self.prompt_token_ids = ids
        self.all_token_ids = [*ids, 7]
        self.num_computed_tokens, self.num_tokens = len(ids), len(ids) + 1
        self.sampling_params = None
        self.cache_salt: str | None = None
        self.block_hashes = ["unsalted"]

    def update_block_hashes(self) -> None:
        self.block_hashes.append(f"salted with {self.cache_salt}")


@pytest.fixture
def side(support: Callable[[str], ModuleType]) -> Any:
    missing = support("vllm_engines").MISSING
    if missing:
        pytest.skip(missing)
    from vllm_cacheslide.planning import Planning
    from vllm_cacheslide.scheduling import Scheduling

    sizes = {"layers": 2, "hidden": 32, "intermediate": 64, "heads": 4, "kv_heads": 2}
    cost = CostModel.from_geometry(**sizes, head_dim=8)
    return Scheduling(Planning(cost, "model", "", one_per_session=True), step_rows=100)


def turns(seed: int = 0, update: int = 60) -> tuple[list[int], list[int]]:
    """The update of the second turn has `update` tokens."""
    numbers = np.random.default_rng(seed)
    head, old, new, tail = (
        numbers.integers(2, 500, size).tolist() for size in (40, 10, update, 200)
    )
    return head + old + tail, head + new + tail


def admit(side: Any, request: Request, blocks: tuple[int, ...] = (1, 2)) -> int | None:
    """What vLLM does in a step: ask, and give blocks unless it has to wait."""
    provided: int | None = side.matched(request, 0)
    if provided is not None:
        side.admitted(request, blocks, provided)
    return provided


def stored(side: Any, ids: list[int], **options: Any) -> Request:
    request = Request(ids, REUSE, **options)
    side.arrived(request)
    admit(side, request)
    assert side.finished(request, (1, 2))
    return request


def test_a_first_prompt_is_left_to_vllm_under_its_own_hash(side: Any) -> None:
    request = Request(turns()[0], REUSE)
    side.arrived(request)
    assert admit(side, request) == 0
    assert request.block_hashes == ["unsalted"]
    (note,) = side.take_orders().notes
    assert note.order.plan.outcome == "cold"


def test_approximate_blocks_get_a_salt_of_their_own(side: Any) -> None:
    first, second = turns()
    stored(side, first)
    one, other = Request(second, REUSE), Request(second, REUSE)
    for request in (one, other):
        side.arrived(request)
        assert request.block_hashes == [f"salted with {request.cache_salt}"]
    assert one.cache_salt and other.cache_salt and one.cache_salt != other.cache_salt
    assert admit(side, one) == len(second) - 1


def test_exact_blocks_are_shared_within_a_namespace_only(side: Any) -> None:
    ids = turns()[0]
    asked = [Request(ids, REUSE, namespace=name) for name in ("a", "a", "b", "default")]
    client = Request(ids, REUSE, namespace="a")
    client.cache_salt = "the client's own"
    for request in (*asked, client):
        side.arrived(request)
    one, again, other, default = (request.cache_salt for request in asked)
    assert one == again
    assert default is None
    assert len({one, other, client.cache_salt}) == 3


def test_salts_of_namespaces_hang_on_the_servers_secret(
    side: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    salts = []
    for secret in ("one", "two"):
        monkeypatch.setattr(side, "_stamp", secret)
        request = Request(turns()[0], REUSE, namespace="a")
        request.kv_transfer_params[PARAMETER]["stamp"] = secret
        side.arrived(request)
        salts.append(request.cache_salt)
    assert None not in salts
    assert salts[0] != salts[1]


def test_the_dense_reference_is_kept_from_vllms_prefix_cache(side: Any) -> None:
    request = Request(turns()[0], Recompute())
    side.arrived(request)
    assert request.cache_salt is not None
    assert admit(side, request) == 0


def test_rows_that_are_ranked_on_the_way_are_ranked_from_the_first_token_on(side: Any) -> None:
    """A later answer, and one that was preempted, find blocks; vLLM goes on from these itself."""
    first, second = turns(update=20)
    stored(side, first)
    policy = CacheSlide(selector=KeyDeviation(1, 0.26), may_decline=False)
    answers = [Request(second, policy, request_id="same") for _ in range(2)]
    for request in answers:
        side.arrived(request)
    assert admit(side, answers[0]) == len(second) - 1
    assert side.take_orders().prefills[0].order.plan.narrow is not None
    assert side.matched(answers[1], 32) == 0
    assert side.matched(answers[0], 32) == 0


def test_answers_to_one_prompt_share_plan_and_salt_and_one_is_kept(side: Any) -> None:
    first, second = turns(update=20)
    stored(side, first)
    answers = [Request(second, REUSE, request_id="same") for _ in range(3)]
    for request in answers:
        side.arrived(request)
        admit(side, request)
    assert len({request.cache_salt for request in answers}) == 1
    assert [side.finished(request, (1,)) for request in answers] == [True, False, False]
    orders = side.take_orders()
    assert [each.order.sibling for each in orders.prefills] == [False, True, True]


def test_two_requests_of_one_name_but_another_policy_have_a_plan_each(side: Any) -> None:
    """A trace id may name a judge's dense request as well as the answer that is judged."""
    first, second = turns(update=20)
    stored(side, first)
    side.take_orders()
    for policy in (REUSE, Recompute()):
        request = Request(second, policy, request_id="trace")
        side.arrived(request)
        admit(side, request)
    orders = side.take_orders()
    asked = [each.order for each in (*orders.prefills, *orders.notes)]
    told = [(order.plan.outcome, order.sibling) for order in asked]
    assert told == [("partial", False), ("cold", False)]


def test_one_step_holds_only_so_many_of_our_rows(side: Any) -> None:
    """Sixty tokens of update each: the second has to wait, whatever vLLM's budget says."""
    first, second = turns()
    stored(side, first)
    side.take_orders()
    one, other = Request(second, REUSE), Request(second, REUSE)
    for request in (one, other):
        side.arrived(request)
    assert admit(side, one) == len(second) - 1
    assert admit(side, other) is None
    assert len(side.take_orders().prefills) == 1
    assert admit(side, other) == len(second) - 1


def test_a_request_longer_than_a_step_is_not_put_off_for_ever(side: Any) -> None:
    first, second = turns(update=150)
    stored(side, first)
    side.take_orders()
    request = Request(second, REUSE)
    side.arrived(request)
    assert admit(side, request) == len(second) - 1


def test_a_turn_is_planned_on_a_context_that_is_still_to_be_stored(side: Any) -> None:
    first, second = turns()
    stored(side, first)
    request = Request(second, REUSE)
    side.arrived(request)
    admit(side, request)
    orders = side.take_orders()
    assert {orders.keeps[0].number} == set(orders.prefills[0].order.sources)


def test_what_the_workers_lost_is_not_planned_on(side: Any) -> None:
    from vllm_cacheslide.orders import StepResults

    first, second = turns()
    stored(side, first)
    (keep,) = side.take_orders().keeps
    side.learn(StepResults(lost=frozenset({keep.number})))
    request = Request(second, REUSE)
    side.arrived(request)
    admit(side, request)
    assert side.take_orders().notes[0].order.plan.outcome == "cold"


def test_a_plan_whose_source_has_left_is_made_again(side: Any) -> None:
    """While the request waited, its session's next context was ordered to be stored."""
    first, second = turns()
    stored(side, first, session="agent")
    request = Request(second, REUSE, session="agent")
    side.arrived(request)
    salt = request.cache_salt
    stored(side, first[:-20], session="agent")
    keeps = side.take_orders().keeps
    assert admit(side, request) == len(second) - 1
    (prefill,) = side.take_orders().prefills
    assert set(prefill.order.sources) == {keeps[1].number}
    assert request.cache_salt == salt
    assert prefill.order.plan.runs[0].source.ids.size == len(first) - 20


def test_contexts_of_another_namespace_are_not_seen(side: Any) -> None:
    first, second = turns()
    stored(side, first, namespace="one")
    request = Request(second, REUSE, namespace="other")
    side.arrived(request)
    assert admit(side, request) == 0


def test_a_request_cut_off_in_its_prefill_leaves_nothing(side: Any) -> None:
    request = Request(turns()[0], REUSE)
    side.arrived(request)
    request.num_computed_tokens = 20
    assert not side.finished(request, (1,))
    assert side.take_orders().ended == (request.request_id,)


def test_a_forged_annotation_leaves_the_request_to_vllm(side: Any) -> None:
    request = Request(turns()[0], REUSE)
    request.kv_transfer_params["cacheslide"]["policy"] = {"type": "Popen"}
    side.arrived(request)
    assert admit(side, request) == 0
    assert not side.finished(request, (1,))


def test_spans_that_do_not_fit_the_tokens_are_answered_densely_and_named(side: Any) -> None:
    request = Request(turns()[0], REUSE)
    request.kv_transfer_params["cacheslide"]["spans"] = [["a", "reuse", 0, 9999, "d"]]
    side.arrived(request)
    admit(side, request)
    (note,) = side.take_orders().notes
    assert note.order.plan.outcome == "fallback"
    assert "9999" in note.order.plan.reason


def test_an_engine_that_is_off_says_so_in_every_plan(side: Any) -> None:
    from vllm_cacheslide.orders import StepResults

    side.learn(StepResults(off="a layout that we do not know"))
    request = Request(turns()[0], REUSE)
    side.arrived(request)
    admit(side, request)
    (note,) = side.take_orders().notes
    assert (note.order.plan.outcome, "layout" in note.order.plan.reason) == ("fallback", True)
    assert not side.finished(request, (1,))
