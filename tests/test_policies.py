"""The policies as values: names, knobs, positions."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from cacheslide_agents.chunks import Role, Span
from cacheslide_agents.errors import RequestError
from cacheslide_agents.policies import (
    POLICY_NAMES,
    CacheBlend,
    CacheSlide,
    Epic,
    Order,
    Policy,
    Population,
    Prefix,
    PromptCache,
    Recompute,
    Reuse,
    named,
)
from cacheslide_agents.selection import (
    Affinity,
    AfterRemoval,
    Boundary,
    CkSimGate,
    KeyDeviation,
    PaperFusion,
    Replace,
    Tail,
    Union,
)


def spans(*lengths: int) -> tuple[Span, ...]:
    """Chunks `c0`, `c1`, ... of these many tokens."""
    ends = np.cumsum(lengths).tolist()
    return tuple(
        Span(f"c{i}", Role.REUSE, end - length, end, "digest")
        for i, (length, end) in enumerate(zip(lengths, ends, strict=True))
    )


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_a_named_policy_bears_its_name_and_fulfils_the_contract(name: str) -> None:
    policy = named(name)
    assert policy.name == name
    assert isinstance(policy, Policy)
    assert policy == named(name)
    assert hash(policy) == hash(named(name))


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(RequestError, match="no policy is named 'blend'; known: recompute, prefix"):
        named("blend")


def test_only_the_default_policy_may_decline() -> None:
    assert [name for name in POLICY_NAMES if named(name).may_decline] == ["cacheslide"]


def test_policies_say_what_they_reuse_and_what_must_have_been_stored() -> None:
    table = {name: (named(name).reuse, named(name).population) for name in POLICY_NAMES}
    assert table == {
        "recompute": (Reuse.NOTHING, Population.NONE),
        "prefix": (Reuse.EXACT_PREFIX, Population.CONTEXT),
        "prompt_cache": (Reuse.CHUNKS, Population.ISOLATED),
        "cache_blend": (Reuse.CHUNKS, Population.ISOLATED),
        "epic": (Reuse.CHUNKS, Population.ISOLATED),
        "cache_blend_context": (Reuse.RUNS, Population.CONTEXT),
        "epic_context": (Reuse.RUNS, Population.CONTEXT),
        "cacheslide": (Reuse.RUNS, Population.CONTEXT),
        "cacheslide_paper": (Reuse.RUNS, Population.CONTEXT),
    }


def test_baselines_carry_their_papers_values() -> None:
    assert CacheBlend().selector == KeyDeviation(layer=1, fraction=0.18, noise=0.0)
    assert Epic().selector == Boundary(tokens=64, min_run=0)
    assert PromptCache().selector is None
    assert Recompute().selector is None


def test_the_default_corrects_what_speaks_of_a_change_what_follows_it_and_the_tail() -> None:
    policy = CacheSlide()
    expected = Union(Affinity(0.03), Boundary(16), AfterRemoval(64), Tail(64))
    assert policy.selector == expected
    assert policy.fusion == Replace()
    assert policy.gate is None
    assert policy.order is Order.RELATIVE


def test_the_papers_rule_is_key_deviation_literal_fusion_and_the_printed_gate() -> None:
    policy = CacheSlide.paper()
    assert policy.selector == KeyDeviation(layer=1, fraction=0.26)
    assert policy.fusion == PaperFusion()
    assert policy.gate == CkSimGate(reading="literal", tau=0.12, every=4)


def test_the_papers_rule_can_be_run_with_other_readings() -> None:
    policy = CacheSlide.paper(fusion="replace", gate="converged", fraction=0.5, tau=0.2)
    assert policy.selector == KeyDeviation(layer=1, fraction=0.5)
    assert policy.fusion == Replace()
    assert policy.gate == CkSimGate(reading="converged", tau=0.2, every=4)
    assert CacheSlide.paper(gate=None).gate is None


@pytest.mark.parametrize(
    "make",
    [
        lambda: CacheBlend(fraction=1.1),
        lambda: CacheBlend(fraction=-0.1),
        lambda: CacheBlend(fraction=math.nan),
        lambda: CacheBlend(layer=-1),
        lambda: CacheBlend(population=Population.NONE),
        lambda: Epic(tokens=-1),
        lambda: Epic(tokens=math.nan),
        lambda: Epic(min_run=0),
        lambda: Prefix(min_run=0),
        lambda: CacheSlide(min_run=0),
        lambda: CacheSlide.paper(fraction=2.0),
        lambda: CacheSlide.paper(fusion="half"),  # type: ignore[arg-type]
        lambda: CacheSlide.paper(gate="half"),  # type: ignore[arg-type]
        lambda: PromptCache(slots={"memory": -1}),
    ],
)
def test_a_knob_out_of_range_is_refused(make: Callable[[], Policy]) -> None:
    with pytest.raises(RequestError):
        make()


def test_plain_policies_leave_every_token_where_it_stands() -> None:
    assert CacheSlide().positions(spans(2, 3), 5).tolist() == [0, 1, 2, 3, 4]


def test_a_short_value_leaves_the_rest_of_its_slot_empty() -> None:
    policy = PromptCache(slots={"c1": 5})
    assert policy.positions(spans(2, 3, 2), 7).tolist() == [0, 1, 2, 3, 4, 7, 8]


def test_slots_add_up_and_an_empty_value_still_takes_its_slot() -> None:
    policy = PromptCache(slots={"c0": 2, "c2": 4})
    assert policy.positions(spans(1, 1, 0, 2), 4).tolist() == [0, 2, 7, 8]


def test_a_value_longer_than_its_slot_moves_what_follows_and_says_so() -> None:
    policy = PromptCache(slots={"c0": 2, "c1": 9})
    assert policy.positions(spans(3, 1, 2), 6).tolist() == [0, 1, 2, 3, 12, 13]
    assert policy.reasons(spans(3, 1, 2)) == {"c0": "overflow"}


def test_without_spans_a_schema_changes_nothing() -> None:
    assert PromptCache(slots={"c0": 9}).positions((), 3).tolist() == [0, 1, 2]


def test_slots_may_be_given_as_a_mapping_or_as_pairs() -> None:
    assert PromptCache(slots={"b": 2, "a": 1}) == PromptCache(slots=(("a", 1), ("b", 2)))
