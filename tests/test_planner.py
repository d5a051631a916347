"""Plans for small hand-made prompts: what is reused, computed, exact, and why."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from cacheslide_agents.chunks import Role, Span, text_digest
from cacheslide_agents.errors import (
    ModelError,
    NonFiniteError,
    PageError,
    RequestError,
    ReuseError,
    StoreError,
)
from cacheslide_agents.pages.base import ContextKey, StoredContext
from cacheslide_agents.pages.store import MemoryStore
from cacheslide_agents.policies import (
    CacheBlend,
    CacheSlide,
    Epic,
    Order,
    Plan,
    Policy,
    Prefix,
    PromptCache,
    Recompute,
)
from cacheslide_agents.policies.cost import CostModel
from cacheslide_agents.policies.planner import dense_plan, make_plan
from cacheslide_agents.policies.work import Work
from cacheslide_agents.selection import (
    CkSimGate,
    Everything,
    Fixed,
    KeyDeviation,
    PaperFusion,
    SelectionView,
)

KEY = ContextKey("model", "tenant", "task")
LAYERS, KV_HEADS, HEAD_DIM = 3, 2, 4
SIZES = {"layers": 30, "hidden": 576, "intermediate": 1536, "heads": 9, "kv_heads": 3}
Values = Mapping[str, Sequence[int]]
RECOMPUTED = ("memory", "cue")
SYSTEM, DOCUMENT, CUE = range(100, 132), range(400, 464), range(900, 904)
OLD, NEW = range(200, 220), range(300, 325)
OLD_TURN: Values = {"system": SYSTEM, "memory": OLD, "document": DOCUMENT, "cue": CUE}
NEW_TURN: Values = {**OLD_TURN, "memory": NEW}


def encoded(values: Values) -> tuple[npt.NDArray[np.int64], tuple[Span, ...]]:
    ids: list[int] = []
    spans = []
    for id, tokens in values.items():
        role = Role.RECOMPUTE if id in RECOMPUTED else Role.REUSE
        stop = len(ids) + len(tokens)
        spans.append(Span(id, role, len(ids), stop, text_digest(repr(list(tokens)))))
        ids.extend(tokens)
    return np.array(ids, dtype=np.int64), tuple(spans)


@dataclass
class World:
    """A store, and plans made against it."""

    store: MemoryStore = field(default_factory=lambda: MemoryStore(1 << 24))
    cost: CostModel = field(default_factory=lambda: CostModel.from_geometry(**SIZES, head_dim=64))
    probe: Any = None

    def keep(
        self, values: Values, *, exact: int | None = None, session: str | None = None
    ) -> StoredContext:
        """Store a request of which the first `exact` tokens (all by default) are exact."""
        ids, spans = encoded(values)
        mask = np.arange(len(ids)) < (len(ids) if exact is None else exact)
        context = StoredContext(KEY, ids, mask, spans, session)
        self.store.put(context, layers_of(ids))
        return context

    def keep_alone(self, *chunks: Sequence[int]) -> None:
        for chunk in chunks:
            ids = np.array(chunk, dtype=np.int64)
            exact = np.ones(len(ids), dtype=np.bool_)
            self.store.put(StoredContext(KEY, ids, exact, isolated=True), layers_of(ids))

    def plan(self, values: Values, policy: Policy, session: str | None = None) -> Plan:
        ids, spans = encoded(values)
        return make_plan(ids, spans, KEY, session, policy, self.store, self.cost, self.probe)


@pytest.fixture
def world() -> World:
    return World()


def layers_of(ids: npt.NDArray[np.int64]) -> list[tuple[Tensor, Tensor]]:
    """Keys that tell token, place, layer, head and dimension; see `key_of`."""
    places = torch.from_numpy(8192 * ids + 32 * np.arange(len(ids))).float()[None, :, None]
    keys = [key_of(0, 0, layer)[:, None] + places for layer in range(LAYERS)]
    return [(each, each + 0.5) for each in keys]


def key_of(token: int, place: int, layer: int) -> Tensor:
    """[kv_heads, head_dim], exact in float32."""
    base = torch.arange(KV_HEADS * HEAD_DIM, dtype=torch.float32).reshape(KV_HEADS, HEAD_DIM)
    return base + 8 * layer + 32 * place + 8192 * token


def runs(plan: Plan) -> list[tuple[int, int, int]]:
    return [(p.run.start, p.run.cached_start, p.run.length) for p in plan.runs]


def where(mask: npt.NDArray[np.bool_]) -> list[int]:
    return np.flatnonzero(mask).tolist()


@dataclass(frozen=True)
class Spy:
    """A selector that does whatever the test says."""

    do: Callable[[SelectionView], Any]

    def select(self, view: SelectionView) -> Any:
        return self.do(view)


def slide(do: Callable[[SelectionView], Any] | None = None, **knobs: Any) -> CacheSlide:
    """CacheSlide without correction, or with the selection the test says."""
    return CacheSlide(selector=None if do is None else Spy(do), **knobs)


def test_with_nothing_cached_everything_is_computed(world: World) -> None:
    plan = world.plan(NEW_TURN, CacheSlide())
    assert plan.outcome == "cold"
    assert plan.reason == "cold"
    assert plan.runs == ()
    assert plan.active.all()
    assert plan.exact.all()
    assert set(plan.chunk_reasons.values()) == {"cold"}


def test_a_changed_chunk_costs_itself_and_the_last_token(world: World) -> None:
    source = world.keep(OLD_TURN)
    plan = world.plan(NEW_TURN, slide())
    assert runs(plan) == [(0, 0, 32), (57, 52, 67)]
    assert all(planned.source is source for planned in plan.runs)
    assert where(plan.active) == [*range(32, 57), 124]
    assert plan.head == 32
    assert where(plan.exact) == list(range(57))
    assert plan.outcome == "hit"
    assert plan.chunk_reasons == {"system": "", "memory": "changed", "document": "", "cue": ""}
    assert plan.positions.tolist() == list(range(125))


def test_a_shrunk_chunk_shifts_the_rest_to_the_left(world: World) -> None:
    world.keep(NEW_TURN)
    plan = world.plan(OLD_TURN, slide())
    assert runs(plan) == [(0, 0, 32), (52, 57, 67)]
    assert [planned.run.shift for planned in plan.runs] == [0, -5]


def test_an_identical_prompt_computes_only_its_last_token(world: World) -> None:
    world.keep(OLD_TURN)
    plan = world.plan(OLD_TURN, CacheSlide())
    assert runs(plan) == [(0, 0, 119)]
    assert where(plan.active) == [119]
    assert plan.head == 119
    assert plan.exact.all()
    assert plan.outcome == "hit"
    assert plan.view is None


def test_a_prompt_that_is_a_head_of_a_longer_one_computes_only_its_last_token(
    world: World,
) -> None:
    world.keep({**OLD_TURN, "answer": range(1000, 1040)})
    assert where(world.plan(OLD_TURN, CacheSlide()).active) == [119]


def test_an_unrelated_prompt_reuses_nothing(world: World) -> None:
    world.keep({"system": range(2000, 2100)})
    plan = world.plan(NEW_TURN, CacheSlide())
    assert (plan.outcome, plan.reason) == ("cold", "no_run")
    assert plan.active.all()
    assert plan.exact.all()
    assert set(plan.chunk_reasons.values()) == {"new"} | {"changed"}


def test_a_vanished_chunk_is_reported_and_moves_the_rest(world: World) -> None:
    world.keep({"system": SYSTEM, "old": OLD, "document": DOCUMENT, "cue": CUE})
    plan = world.plan({"system": SYSTEM, "document": DOCUMENT, "cue": CUE}, slide())
    assert runs(plan) == [(0, 0, 32), (32, 52, 67)]
    assert where(plan.active) == [99]
    assert where(plan.exact) == list(range(32))
    (gone,) = plan.vanished
    assert (gone.id, gone.tokens, gone.outcome, gone.reason) == ("old", 20, "vanished", "removed")


def test_of_two_chunks_that_changed_places_the_longer_is_reused(world: World) -> None:
    a, b = range(100, 150), range(200, 280)
    world.keep({"a": a, "b": b, "cue": CUE})
    plan = world.plan({"b": b, "a": a, "cue": CUE}, slide())
    assert runs(plan) == [(0, 50, 80)]
    assert plan.chunk_reasons == {"b": "", "a": "moved", "cue": "short"}
    assert plan.outcome == "partial"
    assert plan.head == 0
    assert not plan.exact.any()


def test_in_any_order_both_are_reused(world: World) -> None:
    a, b = range(100, 150), range(200, 280)
    world.keep({"a": a, "b": b, "cue": CUE})
    plan = world.plan({"b": b, "a": a, "cue": CUE}, slide(order=Order.ANY))
    assert runs(plan) == [(0, 50, 80), (80, 0, 50)]
    assert plan.outcome == "hit"


def test_empty_and_one_token_chunks_do_no_harm(world: World) -> None:
    turn = {"system": SYSTEM, "memory": (), "one": (777,), "document": DOCUMENT, "cue": (5,)}
    assert world.plan(turn, CacheSlide()).outcome == "cold"
    world.keep(turn)
    plan = world.plan({**turn, "memory": NEW}, slide())
    assert runs(plan) == [(0, 0, 32), (57, 32, 65)]
    assert plan.chunk_reasons["one"] == ""
    assert plan.chunk_reasons["cue"] == "last_token"
    assert world.plan(turn, slide()).chunk_reasons["memory"] == "empty"
    assert plan.outcome == "hit"


def test_a_chunk_that_tokenises_differently_at_its_border_is_cut_at_a_seam(world: World) -> None:
    world.keep(OLD_TURN)
    ids, spans = encoded(NEW_TURN)
    ids[57] = 7
    plan = make_plan(ids, spans, KEY, None, slide(), world.store, world.cost)
    assert runs(plan) == [(0, 0, 32), (58, 53, 66)]
    assert plan.chunk_reasons["document"] == "seam"
    assert plan.outcome == "partial"


def test_without_spans_the_whole_prompt_counts_as_one_chunk(world: World) -> None:
    world.keep(OLD_TURN)
    ids, _ = encoded(NEW_TURN)
    plan = make_plan(ids, (), KEY, None, slide(), world.store, world.cost)
    assert plan.outcome == "partial"
    ids, _ = encoded(OLD_TURN)
    assert make_plan(ids, (), KEY, None, slide(), world.store, world.cost).outcome == "hit"


def test_recompute_ignores_what_is_cached(world: World) -> None:
    world.keep(OLD_TURN)
    plan = world.plan(OLD_TURN, Recompute())
    assert (plan.outcome, plan.reason) == ("cold", "disabled")
    assert plan.active.all()


def test_of_several_contexts_the_one_that_shares_most_is_taken(world: World) -> None:
    best = world.keep(OLD_TURN)
    for other in range(9):
        world.keep({"system": SYSTEM, "document": range(2000 + 100 * other, 2050 + 100 * other)})
    plan = world.plan(NEW_TURN, slide())
    assert {planned.source for planned in plan.runs} == {best}


def test_of_equal_contexts_that_of_the_session_is_taken(world: World) -> None:
    mine = world.keep(OLD_TURN, session="mine")
    world.keep(OLD_TURN, session="other")
    plan = world.plan(NEW_TURN, slide(), session="mine")
    assert {planned.source for planned in plan.runs} == {mine}


def test_the_same_request_gets_the_same_plan(world: World) -> None:
    world.keep(OLD_TURN)
    first, second = (world.plan(NEW_TURN, CacheSlide()) for _ in range(2))
    assert runs(first) == runs(second)
    assert where(first.active) == where(second.active)


class TestPrefix:
    def test_reuse_stops_at_the_first_change(self, world: World) -> None:
        world.keep(OLD_TURN)
        plan = world.plan(NEW_TURN, Prefix())
        assert runs(plan) == [(0, 0, 32)]
        assert where(plan.active) == list(range(32, 125))
        assert plan.exact.all()
        assert plan.outcome == "partial"
        assert plan.chunk_reasons == {
            "system": "",
            "memory": "changed",
            "document": "after_change",
            "cue": "after_change",
        }

    def test_approximate_keys_are_not_taken(self, world: World) -> None:
        world.keep(OLD_TURN, exact=40)
        plan = world.plan(OLD_TURN, Prefix())
        assert runs(plan) == [(0, 0, 40)]
        assert plan.exact.all()
        assert plan.chunk_reasons["document"] == "inexact"

    def test_the_longest_exact_head_of_all_contexts_is_taken(self, world: World) -> None:
        exact = world.keep({"system": SYSTEM, "memory": OLD})
        world.keep(OLD_TURN, exact=40)
        plan = world.plan(OLD_TURN, Prefix())
        assert runs(plan) == [(0, 0, 52)]
        assert plan.runs[0].source is exact

    def test_an_exact_head_is_found_behind_a_hundred_newer_contexts(self, world: World) -> None:
        exact = world.keep(OLD_TURN)
        for other in range(100):
            world.keep({"system": range(1000 + other, 1032 + other)})
        assert world.plan(NEW_TURN, Prefix()).runs[0].source is exact

    def test_a_head_shorter_than_a_block_is_no_hit(self, world: World) -> None:
        world.keep({"system": range(100, 115), "memory": OLD})
        plan = world.plan({"system": range(100, 115), "memory": NEW}, Prefix())
        assert (plan.outcome, plan.reason) == ("cold", "no_run")


class TestDeclining:
    def test_plain_prefix_reuse_is_taken_where_loads_cost_more_than_they_save(self) -> None:
        world = World(cost=CostModel.from_geometry(**SIZES, head_dim=64, kv_bytes=10**7))
        world.keep(OLD_TURN)
        plan = world.plan(NEW_TURN, CacheSlide())
        assert (plan.outcome, plan.reason) == ("declined", "prefix_cheaper")
        assert plan.chunk_reasons["document"] == "prefix_cheaper"
        assert plan.chunk_reasons["memory"] == "changed"
        assert plan.exact.all()
        assert where(plan.active) == where(world.plan(NEW_TURN, Prefix()).active)

    def test_a_policy_that_may_not_decline_does_not(self) -> None:
        world = World(cost=CostModel.from_geometry(**SIZES, head_dim=64, kv_bytes=10**7))
        world.keep(OLD_TURN)
        assert world.plan(NEW_TURN, CacheSlide(may_decline=False)).outcome == "hit"

    def test_a_selection_that_leaves_nothing_to_save_is_declined(self, world: World) -> None:
        world.keep(OLD_TURN)
        plan = world.plan(NEW_TURN, slide(lambda view: view.candidates))
        assert plan.outcome == "declined"

    def test_what_a_declined_selection_has_probed_is_still_counted(self, world: World) -> None:
        def look(view: SelectionView) -> Any:
            view.new_keys(1)
            return view.candidates

        world.keep(OLD_TURN)
        world.probe = lambda draft, rows, layer: torch.ones(len(rows), KV_HEADS, HEAD_DIM)
        plan = world.plan(NEW_TURN, slide(look))
        assert plan.outcome == "declined"
        assert plan.probe_layer_tokens == len(NEW) * 2

    def test_an_appended_exchange_is_an_ordinary_prefix_hit_without_selection(
        self, world: World
    ) -> None:
        def never(view: SelectionView) -> Any:
            raise AssertionError("asked although nothing stands after the change")

        world.keep({"system": SYSTEM, "document": DOCUMENT})
        turn = {"system": SYSTEM, "document": DOCUMENT, "cue": NEW}
        plan, prefix = world.plan(turn, slide(never)), world.plan(turn, Prefix())
        assert (plan.outcome, plan.reason) == ("hit", "")
        assert runs(plan) == runs(prefix) == [(0, 0, 96)]
        assert where(plan.active) == where(prefix.active)

    def test_an_approximate_head_is_reused_as_it_stands_and_called_so(self, world: World) -> None:
        world.keep({"system": SYSTEM, "document": DOCUMENT}, exact=40)
        plan = world.plan({"system": SYSTEM, "document": DOCUMENT, "cue": NEW}, CacheSlide())
        assert runs(plan) == [(0, 0, 96)]
        assert where(plan.exact) == list(range(40))

    def test_an_exact_head_of_another_context_beats_an_equal_approximate_one(
        self, world: World
    ) -> None:
        exact = world.keep({"system": SYSTEM, "document": DOCUMENT, "old": OLD})
        world.keep({"system": SYSTEM, "document": DOCUMENT}, exact=40)
        plan = world.plan({"system": SYSTEM, "document": DOCUMENT, "cue": NEW}, CacheSlide())
        assert plan.runs[0].source is exact
        assert plan.exact.all()


class TestSelection:
    def test_selected_hits_become_active(self, world: World) -> None:
        world.keep(OLD_TURN)
        plan = world.plan(NEW_TURN, CacheSlide(selector=Fixed((10, 60, 61))))
        assert where(plan.active) == [*range(32, 57), 60, 61, 124]
        assert where(plan.active & plan.hit) == [60, 61]

    def test_with_everything_selected_the_prefill_is_exact(self, world: World) -> None:
        world.keep(OLD_TURN)
        plan = world.plan(NEW_TURN, CacheSlide(selector=Everything(), may_decline=False))
        assert where(~plan.active) == list(range(32))
        assert plan.exact.all()

    def test_fused_corrections_are_never_exact(self, world: World) -> None:
        world.keep(OLD_TURN)
        policy = CacheSlide(selector=Everything(), fusion=PaperFusion(), may_decline=False)
        assert where(world.plan(NEW_TURN, policy).exact) == list(range(57))

    def test_corrections_that_a_gate_may_end_are_not_exact(self, world: World) -> None:
        world.keep(OLD_TURN)
        policy = CacheSlide(selector=Everything(), gate=CkSimGate(), may_decline=False)
        assert where(world.plan(NEW_TURN, policy).exact) == list(range(57))

    def test_selectors_see_the_cached_keys_of_the_candidates(self, world: World) -> None:
        seen: list[Tensor] = []
        world.keep(OLD_TURN)

        def look(view: SelectionView) -> Any:
            assert view.candidates.tolist() == list(range(57, 124))
            seen.extend((view.cached_keys(2), view.removed_keys(1)))
            return view.candidates[:0]

        world.plan(NEW_TURN, slide(look))
        turn = encoded(OLD_TURN)[0]
        kept = [key_of(int(turn[i]), i, 2) for i in range(52, 119)]
        removed = [key_of(int(turn[i]), i, 1) for i in range(32, 52)]
        assert torch.equal(seen[0], torch.stack(kept))
        assert torch.equal(seen[1], torch.stack(removed))

    def test_new_keys_come_from_the_probe_once_and_are_counted(self, world: World) -> None:
        asked: list[tuple[list[int], int]] = []

        def probe(draft: Plan, rows: npt.NDArray[np.int64], layer: int) -> Tensor:
            asked.append((rows.tolist(), layer))
            assert runs(draft) == [(0, 0, 32), (57, 52, 67)]
            return torch.ones(len(rows), KV_HEADS, HEAD_DIM)

        def look(view: SelectionView) -> Any:
            assert view.new_keys(1).shape == view.new_keys(1).shape == (25, KV_HEADS, HEAD_DIM)
            return view.candidates[:1]

        world.keep(OLD_TURN)
        world.probe = probe
        plan = world.plan(NEW_TURN, slide(look))
        assert asked == [(list(range(32, 57)), 1)]
        assert plan.probe_layer_tokens == 25 * 2

    def test_half_precision_keys_are_widened(self, world: World) -> None:
        seen: list[Tensor] = []

        def look(view: SelectionView) -> Any:
            seen.append(view.cached_keys(0))
            return view.candidates[:0]

        ids, spans = encoded(OLD_TURN)
        keys = torch.ones(KV_HEADS, len(ids), HEAD_DIM, dtype=torch.bfloat16)
        exact = np.ones(len(ids), dtype=np.bool_)
        world.store.put(StoredContext(KEY, ids, exact, spans), [(keys, keys)])
        world.plan(NEW_TURN, slide(look))
        assert seen[0].dtype == torch.float32

    def test_a_layer_selector_is_left_to_the_executor(self, world: World) -> None:
        world.keep(OLD_TURN)
        plan = world.plan(NEW_TURN, CacheSlide.paper())
        assert plan.narrow == KeyDeviation(layer=1, fraction=0.26)
        assert plan.view is not None
        assert plan.view.candidates.tolist() == list(range(57, 124))
        assert where(plan.active) == [*range(32, 57), 124]
        assert where(plan.exact) == list(range(57))

    def test_the_work_of_a_layer_selector_is_wide_at_first_and_narrow_above(
        self, world: World
    ) -> None:
        world.keep(OLD_TURN)
        work = Work.planned(world.plan(NEW_TURN, CacheSlide.paper()), layers=30)
        corrected = math.ceil(0.26 * 67)
        assert work.rows == pytest.approx(2 * (125 - 32) + 28 * (26 + corrected))
        assert work.loaded == (32 + 67) * 30
        assert work.selecting == 1.0

    def test_a_layer_selector_that_selects_nothing_is_dropped(self, world: World) -> None:
        world.keep(OLD_TURN)
        assert world.plan(NEW_TURN, CacheSlide.paper(fraction=0.0)).narrow is None

    @pytest.mark.parametrize(
        "answer", [np.array([200]), np.array([-1]), np.array([40]), np.array([0.5]), [[60]]]
    )
    def test_nonsense_from_a_selector_is_a_reuse_error(self, world: World, answer: Any) -> None:
        world.keep(OLD_TURN)
        with pytest.raises(ReuseError, match="the selector"):
            world.plan(NEW_TURN, slide(lambda view: answer))

    @pytest.mark.parametrize("error", [ZeroDivisionError, RequestError, ModelError, StoreError])
    def test_whatever_a_selector_raises_is_a_reuse_error_naming_the_policy(
        self, world: World, error: type[Exception]
    ) -> None:
        def fail(view: SelectionView) -> Any:
            raise error("by zero")

        world.keep(OLD_TURN)
        expected = f"policy 'cacheslide' failed: {error.__name__}: by zero"
        with pytest.raises(ReuseError, match=expected):
            world.plan(NEW_TURN, slide(fail))

    def test_new_keys_without_a_probe_are_a_reuse_error(self, world: World) -> None:
        world.keep(OLD_TURN)
        with pytest.raises(ReuseError, match="no probe"):
            world.plan(NEW_TURN, slide(lambda view: view.new_keys(0)))

    def test_cached_keys_that_are_not_finite_are_a_reuse_error(self, world: World) -> None:
        ids, spans = encoded(OLD_TURN)
        layers = layers_of(ids)
        layers[1][0][0, 60, 0] = float("nan")
        world.store.put(StoredContext(KEY, ids, np.ones(len(ids), dtype=np.bool_), spans), layers)
        with pytest.raises(NonFiniteError, match="cached keys of layer 1"):
            world.plan(NEW_TURN, slide(lambda view: view.cached_keys(1)))

    def test_a_page_that_went_missing_is_passed_on(self, world: World) -> None:
        world.keep(OLD_TURN)
        with pytest.raises(PageError):
            world.plan(NEW_TURN, slide(lambda view: view.cached_keys(LAYERS)))


class TestChunksStoredAlone:
    def test_only_reuse_chunks_are_taken_and_the_first_is_exact(self, world: World) -> None:
        world.keep_alone(SYSTEM, OLD, DOCUMENT, CUE, NEW)
        plan = world.plan(NEW_TURN, PromptCache())
        assert runs(plan) == [(0, 0, 32), (57, 0, 64)]
        assert where(plan.active) == [*range(32, 57), *range(121, 125)]
        assert where(plan.exact) == list(range(57))
        assert plan.outcome == "hit"
        assert plan.chunk_reasons == {
            "system": "",
            "memory": "recompute",
            "document": "",
            "cue": "recompute",
        }

    def test_a_schema_gap_ends_what_is_exact(self, world: World) -> None:
        world.keep_alone(SYSTEM, DOCUMENT)
        plan = world.plan(NEW_TURN, PromptCache(slots={"system": 40}))
        assert plan.positions[31:34].tolist() == [31, 40, 41]
        assert where(plan.exact) == list(range(32))

    def test_a_prompt_with_nothing_stored_stands_at_plain_positions(self, world: World) -> None:
        plan = world.plan(NEW_TURN, PromptCache(slots={"system": 40}))
        assert (plan.outcome, plan.reason) == ("cold", "cold")
        assert plan.positions.tolist() == list(range(125))
        assert plan.exact.all()

    def test_an_overflowing_value_is_reported(self, world: World) -> None:
        world.keep_alone(SYSTEM, DOCUMENT)
        plan = world.plan(NEW_TURN, PromptCache(slots={"memory": 20}))
        assert plan.chunk_reasons["memory"] == "overflow"

    def test_epic_corrects_the_beginning_of_every_chunk_but_the_first(self, world: World) -> None:
        first, second, third = range(100, 140), range(200, 240), range(300, 340)
        world.keep_alone(first, second, third)
        turn = {"a": first, "b": second, "memory": NEW, "c": third, "cue": CUE}
        plan = world.plan(turn, Epic(tokens=3))
        assert runs(plan) == [(0, 0, 40), (40, 0, 40), (105, 0, 40)]
        assert where(plan.active & plan.hit) == [40, 41, 42, 105, 106, 107]

    def test_epic_with_all_tokens_is_exact(self, world: World) -> None:
        world.keep_alone(SYSTEM, DOCUMENT)
        assert world.plan(NEW_TURN, Epic(tokens=float("inf"))).exact.all()

    def test_cache_blend_ranks_what_follows_the_first_chunk(self, world: World) -> None:
        world.keep_alone(SYSTEM, DOCUMENT)
        plan = world.plan({"system": SYSTEM, "document": DOCUMENT, "cue": CUE}, CacheBlend())
        assert plan.view is not None
        assert plan.view.candidates.tolist() == list(range(32, 96))
        keys = [key_of(int(DOCUMENT[i]), i, 1) for i in range(64)]
        assert torch.equal(plan.view.cached_keys(1), torch.stack(keys))

    def test_a_stored_last_chunk_gives_all_but_its_last_token(self, world: World) -> None:
        world.keep_alone(SYSTEM, DOCUMENT)
        plan = world.plan({"system": SYSTEM, "document": DOCUMENT}, Epic(tokens=0))
        assert runs(plan) == [(0, 0, 32), (32, 0, 63)]
        assert plan.outcome == "hit"

    def test_a_short_or_unknown_chunk_says_why(self, world: World) -> None:
        world.keep_alone(SYSTEM)
        turn = {"system": SYSTEM, "tiny": range(7), "document": DOCUMENT, "cue": CUE}
        plan = world.plan(turn, Epic())
        assert plan.chunk_reasons["tiny"] == "short"
        assert plan.chunk_reasons["document"] == "cold"
        assert plan.outcome == "partial"


def test_a_dense_plan_after_trouble_says_so_and_reuses_nothing() -> None:
    ids, spans = encoded(NEW_TURN)
    plan = dense_plan(ids, spans, CacheSlide(), outcome="fallback", reason="PageError: torn")
    assert (plan.outcome, plan.reason) == ("fallback", "PageError: torn")
    assert set(plan.chunk_reasons.values()) == {"fallback"}
    assert plan.active.all()
    assert plan.exact.all()
    assert plan.head == 0


@pytest.mark.parametrize(
    ("ids", "spans", "message"),
    [
        ([], (), "at least one token"),
        ([1, 2], (Span("a", Role.REUSE, 0, 1, ""),), "end at token 1 of 2"),
        ([1, 2], (Span("a", Role.REUSE, 1, 2, ""),), "chunk 'a' spans tokens \\[1, 2\\)"),
    ],
)
def test_a_malformed_prompt_is_a_request_error(
    world: World, ids: list[int], spans: tuple[Span, ...], message: str
) -> None:
    array = np.array(ids, dtype=np.int64)
    with pytest.raises(RequestError, match=message):
        make_plan(array, spans, KEY, None, CacheSlide(), world.store, world.cost)


def test_contexts_of_other_tenants_and_tasks_are_out_of_reach(world: World) -> None:
    world.keep(OLD_TURN)
    ids, spans = encoded(OLD_TURN)
    for key in (ContextKey("model", "other", "task"), ContextKey("model", "tenant", "other")):
        plan = make_plan(ids, spans, key, None, CacheSlide(), world.store, world.cost)
        assert plan.outcome == "cold"
