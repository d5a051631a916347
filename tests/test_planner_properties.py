"""What holds of every plan, whatever the prompts: checked on random edits of random prompts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheslide_agents.chunks import Role, Span, text_digest
from cacheslide_agents.pages.base import ContextKey, StoredContext
from cacheslide_agents.pages.store import MemoryStore
from cacheslide_agents.policies import (
    POLICY_NAMES,
    CacheSlide,
    Order,
    Plan,
    Policy,
    PromptCache,
    named,
)
from cacheslide_agents.policies.cost import CostModel
from cacheslide_agents.policies.planner import make_plan
from cacheslide_agents.policies.receipts import build_receipt
from cacheslide_agents.selection import Everything

KEY = ContextKey("model", "tenant", "task")
LAYERS = 2
Chunks = list[tuple[str, Role, list[int]]]

pieces = st.lists(
    st.tuples(st.sampled_from(list(Role)), st.lists(st.integers(0, 3), max_size=40).map(tuple)),
    min_size=1,
    max_size=6,
)
policies = st.one_of(
    st.sampled_from(POLICY_NAMES).map(named),
    st.just(CacheSlide(order=Order.ANY, min_run=4, may_decline=False)),
    st.just(CacheSlide(selector=Everything(), min_run=4, may_decline=False)),
    st.just(PromptCache(slots={"c0": 50, "c2": 3}, min_run=2)),
)


@st.composite
def turns(draw: st.DrawFn) -> tuple[Chunks, Chunks]:
    """A stored prompt, and one made from its pieces: kept, dropped, repeated, reordered or new."""
    old = draw(pieces)
    kept = draw(st.lists(st.sampled_from(old), max_size=6))
    new = draw(st.permutations([*kept, *draw(st.lists(st.sampled_from(draw(pieces)), max_size=2))]))
    return numbered(old), numbered(new or old)


def numbered(chunks: Sequence[tuple[Role, tuple[int, ...]]]) -> Chunks:
    tokens = [(f"c{i}", role, list(ids)) for i, (role, ids) in enumerate(chunks)]
    return [*tokens, ("end", Role.RECOMPUTE, [9])]


def encoded(chunks: Chunks) -> tuple[npt.NDArray[np.int64], tuple[Span, ...]]:
    ids: list[int] = []
    spans = []
    for id, role, tokens in chunks:
        spans.append(Span(id, role, len(ids), len(ids) + len(tokens), text_digest(repr(tokens))))
        ids.extend(tokens)
    return np.array(ids, dtype=np.int64), tuple(spans)


def planned(old: Chunks, new: Chunks, policy: Policy, exact: int) -> Plan:
    store = MemoryStore(1 << 24)
    ids, spans = encoded(old)
    keep(store, StoredContext(KEY, ids, np.arange(len(ids)) < exact, spans))
    for span in spans:
        alone = ids[span.start : span.stop]
        if len(alone):
            whole = np.ones(len(alone), dtype=np.bool_)
            keep(store, StoredContext(KEY, alone, whole, isolated=True))
    cost = CostModel.from_geometry(
        layers=LAYERS, hidden=64, intermediate=128, heads=2, kv_heads=1, head_dim=32
    )
    prompt, spans = encoded(new)
    return make_plan(prompt, spans, KEY, None, policy, store, cost)


def keep(store: MemoryStore, context: StoredContext) -> None:
    generator = torch.Generator().manual_seed(len(context))
    keys = torch.randn(1, len(context), 4, generator=generator)
    store.put(context, [(keys, keys)] * LAYERS)


def exact_by_definition(plan: Plan) -> list[bool]:
    """Token by token: computed, or kept in place from exact keys; and so is all before it."""
    result: list[bool] = []
    so_far = True
    for i in range(len(plan.ids)):
        held = next((p for p in plan.runs if p.run.start <= i < p.run.stop), None)
        if held is None:
            good = True
        elif plan.active[i]:
            good = not plan.policy.fusion.needs_cached
        else:
            same_head = held.run.start == held.run.cached_start == 0
            good = same_head and bool(held.source.exact[i])
        so_far = so_far and good and int(plan.positions[i]) == i
        result.append(so_far)
    return result


@settings(max_examples=150)
@given(turns(), policies, st.integers(0, 100))
def test_every_plan_is_sound(prompts: tuple[Chunks, Chunks], policy: Policy, exact: int) -> None:
    plan = planned(*prompts, policy, exact)
    length = len(plan.ids)
    assert (plan.active | plan.hit).all()
    assert plan.active[-1]
    assert not plan.hit[-1]
    assert 0 <= plan.head < length
    assert plan.hit[: plan.head].all()
    assert (np.diff(plan.positions) >= 1).all()
    stops = [0]
    for held in plan.runs:
        run = held.run
        assert run.length > 0
        assert run.start >= stops[-1]
        stops.append(run.stop)
        cached = held.source.ids[run.cached_start : run.cached_stop]
        assert plan.ids[run.start : run.stop].tolist() == cached.tolist()
    assert plan.exact.tolist() == exact_by_definition(plan)
    assert (plan.outcome == "cold") <= (not plan.runs)
    assert set(plan.chunk_reasons) == {span.id for span in plan.spans}


@settings(max_examples=100)
@given(turns(), policies)
def test_every_receipt_adds_up(prompts: tuple[Chunks, Chunks], policy: Policy) -> None:
    plan = planned(*prompts, policy, exact=100)
    active = np.flatnonzero(plan.active)
    receipt = build_receipt(
        plan, request_id="r", active=active, rows_per_layer=[len(active)] * LAYERS
    )
    here = [chunk for chunk in receipt.chunks if chunk.outcome != "vanished"]
    assert receipt.reused_tokens + receipt.active_tokens == receipt.prompt_tokens == len(plan.ids)
    assert receipt.compute_fraction == receipt.active_tokens / receipt.prompt_tokens
    assert sum(chunk.tokens for chunk in here) == receipt.prompt_tokens
    assert sum(chunk.reused for chunk in here) == receipt.reused_tokens
    assert sum(chunk.corrected for chunk in here) == int((plan.active & plan.hit).sum())
    for chunk in here:
        assert (chunk.shift is None) == (chunk.outcome == "update")
        assert (chunk.outcome == "hit") <= (chunk.reason in ("", "overflow"))


@settings(max_examples=60)
@given(turns())
def test_the_default_policy_computes_no_more_than_prefix_reuse(
    prompts: tuple[Chunks, Chunks],
) -> None:
    default = planned(*prompts, CacheSlide(), exact=100)
    prefix = planned(*prompts, named("prefix"), exact=100)
    assert int(default.active.sum()) <= int(prefix.active.sum())
