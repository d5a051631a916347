"""Selectors that look at places and key deviations, on hand-made and random alignments."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cacheslide_agents.chunks import Alignment, Edit, Run
from cacheslide_agents.errors import RequestError
from cacheslide_agents.selection import (
    Affinity,
    Boundary,
    Everything,
    Fixed,
    KeyDeviation,
    LayerSelector,
    SelectionView,
    Selector,
    Union,
)


def no_keys(layer: int) -> Tensor:
    raise AssertionError("this selector must not ask for keys")


def view_of(length: int, runs: list[tuple[int, int, int]], cached_length: int) -> SelectionView:
    """Runs are (start, cached start, length); token ids are their own places."""
    alignment = Alignment(length, cached_length, tuple(Run(*run) for run in runs))
    return SelectionView(
        ids=np.arange(length),
        cached_ids=np.arange(cached_length),
        runs=alignment.runs,
        edits=alignment.edits(),
        cached_keys=no_keys,
        removed_keys=no_keys,
        new_keys=no_keys,
    )


# Head of 100, an edit of 10 tokens, a run of 200, a deletion, a run of 32, the question.
TURN = view_of(360, [(0, 0, 100), (110, 105, 200), (310, 400, 32)], 450)
NOTHING_CACHED = view_of(50, [], 0)
IDENTICAL = view_of(50, [(0, 0, 50)], 50)
ONE_TOKEN = view_of(1, [], 0)


@st.composite
def views(draw: st.DrawFn) -> SelectionView:
    pieces = draw(st.lists(st.tuples(*[st.integers(0, 40)] * 3), max_size=6))
    runs, here, there = [], 0, 0
    for new, gone, length in pieces:
        here, there = here + new, there + gone
        if length:
            runs.append((here, there, length))
        here, there = here + length, there + length
    return view_of(here + draw(st.integers(1, 5)), runs, there)


def test_boundary_takes_the_first_tokens_of_each_run_after_an_edit() -> None:
    chosen = Boundary(tokens=16, min_run=32).select(TURN)
    assert chosen.tolist() == [*range(110, 126), *range(310, 326)]


def test_boundary_takes_of_a_short_run_its_share_only() -> None:
    chosen = Boundary(tokens=16, min_run=64).select(TURN)
    assert chosen.tolist() == [*range(110, 126), *range(310, 318)]


def test_boundary_without_a_least_run_takes_runs_shorter_than_its_depth_whole() -> None:
    chosen = Boundary(tokens=50, min_run=0).select(TURN)
    assert chosen.tolist() == [*range(110, 160), *range(310, 342)]


def test_boundary_of_infinite_depth_is_everything() -> None:
    assert np.array_equal(Boundary(tokens=math.inf).select(TURN), TURN.candidates)


def test_boundary_treats_every_isolated_chunk_after_the_first_as_a_run() -> None:
    runs = (Run(0, 0, 100), Run(100, 0, 100), Run(200, 0, 99))
    seams = (Edit(100, 100, 0, 0), Edit(200, 200, 0, 0), Edit(299, 300, 0, 0))
    view = replace(view_of(300, [], 0), runs=runs, edits=seams)
    assert Boundary(tokens=4).select(view).tolist() == [*range(100, 104), *range(200, 204)]


@pytest.mark.parametrize("tokens", [0, 1, 16, 64])
@given(view=views())
def test_boundary_never_takes_a_larger_share_of_short_runs_than_of_long_ones(
    tokens: int, view: SelectionView
) -> None:
    chosen, share = Boundary(tokens=tokens, min_run=64).select(view), tokens / 64
    assert np.isin(chosen, view.candidates).all() and (np.diff(chosen) > 0).all()
    for run in view.runs:
        taken = ((chosen >= run.start) & (chosen < run.stop)).sum()
        assert taken <= min(math.ceil(share * run.length), run.length)


def test_everything_is_every_reused_token_after_the_change_but_the_last_of_the_prompt() -> None:
    assert Everything().select(TURN).tolist() == [*range(110, 342)]
    ends_in_a_hit = view_of(60, [(10, 10, 50)], 60)
    assert Everything().select(ends_in_a_hit).tolist() == [*range(10, 59)]


def test_fixed_takes_its_positions_where_they_are_candidates() -> None:
    assert Fixed((341, 3, 115, 105, 115, 999)).select(TURN).tolist() == [115, 341]
    assert Fixed(()).select(TURN).tolist() == []


def test_a_union_is_the_set_union_of_its_parts() -> None:
    both = Union(Boundary(tokens=4), Fixed((112, 200)), Fixed((50,)))
    assert both.select(TURN).tolist() == [110, 111, 112, 113, 200, 310, 311]
    assert Union().select(TURN).tolist() == []
    assert Union(Boundary(), Fixed((1,))) == Union(Boundary(), Fixed((1,)))


def test_a_union_refuses_a_selector_that_chooses_during_the_forward_pass() -> None:
    with pytest.raises(RequestError, match="KeyDeviation"):
        Union(Boundary(), KeyDeviation())  # type: ignore[arg-type]


SELECTORS: list[Selector] = [
    Boundary(),
    Affinity(),
    Everything(),
    Fixed((0, 20)),
    Union(Boundary(), Affinity()),
]


@pytest.mark.parametrize("selector", SELECTORS, ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("view", [NOTHING_CACHED, IDENTICAL, ONE_TOKEN], ids=["cold", "same", "1"])
def test_without_a_candidate_nothing_is_selected(selector: Selector, view: SelectionView) -> None:
    assert isinstance(selector, Selector)
    chosen = selector.select(view)
    assert chosen.dtype == np.int64 and chosen.shape == (0,)


def keys_like(view: SelectionView, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(len(view.candidates), 3, 8, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_key_deviation_ranks_by_the_squared_distance_of_keys(dtype: torch.dtype) -> None:
    new, cached = keys_like(TURN, 1, dtype), keys_like(TURN, 2, dtype)
    distance = ((new.double() - cached.double()) ** 2).sum((1, 2)).numpy()
    expected = TURN.candidates[np.lexsort((TURN.candidates, -distance))]
    assert np.array_equal(KeyDeviation().rank(TURN, new, cached), expected)


def test_key_deviation_breaks_ties_by_the_lower_position() -> None:
    cached = keys_like(TURN, 2)
    new = cached.clone()
    new[[150, 40, 90, 3]] += torch.tensor([1.0, 0.5, 0.5, 2.0])[:, None, None]
    cached[90] = cached[40]
    new[90] = new[40]
    assert KeyDeviation().rank(TURN, new, cached).tolist() == [113, 260, 150, 200]


def test_key_deviation_never_corrects_rounding() -> None:
    cached = keys_like(TURN, 2).double()
    scale = torch.full((len(cached), 1, 1), 1 + 0.9e-3, dtype=torch.float64)
    scale[7] = 1 + 1.1e-3
    assert KeyDeviation().rank(TURN, cached * scale, cached).tolist() == [117]
    assert len(KeyDeviation(noise=0).rank(TURN, cached * scale, cached)) == len(cached)
    assert KeyDeviation(noise=0).rank(TURN, cached, cached).tolist() == []


def test_key_deviation_of_no_candidates_is_empty() -> None:
    empty = torch.empty(0, 3, 8)
    assert KeyDeviation().rank(IDENTICAL, empty, empty).tolist() == []


@pytest.mark.parametrize(
    ("fraction", "candidates", "budget"),
    [(0.26, 100, 26), (0.26, 101, 27), (0.07, 100, 7), (0.0, 100, 0), (1.0, 100, 100), (0.5, 0, 0)],
)
def test_the_budget_is_the_fraction_rounded_up(
    fraction: float, candidates: int, budget: int
) -> None:
    selector = KeyDeviation(fraction=fraction)
    assert isinstance(selector, LayerSelector)
    assert selector.budget(candidates) == budget


@pytest.mark.parametrize(
    ("selector", "knobs"),
    [
        (KeyDeviation, {"fraction": 1.01}),
        (KeyDeviation, {"fraction": math.nan}),
        (KeyDeviation, {"layer": -1}),
        (KeyDeviation, {"noise": -1e-9}),
        (Affinity, {"fraction": -0.1}),
        (Affinity, {"scores": ()}),
        (Boundary, {"tokens": -1}),
        (Boundary, {"min_run": -1}),
    ],
)
def test_a_knob_out_of_range_is_refused_by_name(selector: Any, knobs: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=rf"{selector.__name__}\({next(iter(knobs))}="):
        selector(**knobs)
