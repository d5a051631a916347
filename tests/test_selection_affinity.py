"""Affinity: token overlap against a plain loop, key cosines against a double precision formula."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cacheslide_agents.chunks import Alignment, Run
from cacheslide_agents.errors import RequestError
from cacheslide_agents.selection import (
    Affinity,
    KeyCosine,
    SelectionView,
    TokenOverlap,
)

Piece = tuple[list[int], list[int], list[int]]
"""New tokens, the tokens they replace, and the reused run that follows."""


def keys_for(seed: int, tokens: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, 2, 4, generator=generator, dtype=torch.float64).float()


def view_of(*pieces: Piece, isolated: bool = False) -> SelectionView:
    ids: list[int] = []
    cached: list[int] = []
    runs = []
    for new, gone, run in pieces:
        ids, cached = ids + new, cached + gone
        if run:
            runs.append(Run(len(ids), len(cached), len(run)))
        ids, cached = ids + run, cached + run
    alignment = Alignment(len(ids), len(cached), tuple(runs))
    hits = sum(len(run) for _, _, run in pieces)
    view = SelectionView(
        ids=np.array(ids, dtype=np.int64),
        cached_ids=np.array([] if isolated else cached, dtype=np.int64),
        runs=alignment.runs,
        edits=alignment.edits(),
        cached_keys=lambda layer: keys_for(layer, len(view.candidates)),
        removed_keys=lambda layer: keys_for(layer + 100, len(cached) - hits),
        new_keys=lambda layer: keys_for(layer + 200, len(ids) - hits),
    )
    return view


def overlap_by_hand(view: SelectionView, spread: float, rarity: float) -> list[float]:
    changed: set[int] = set()
    for edit in view.edits:
        new = set(view.ids[edit.start : edit.stop].tolist())
        changed |= new ^ set(view.cached_ids[edit.cached_start : edit.cached_stop].tolist())
    counts = Counter(view.ids.tolist())
    raw = [0.0] * (len(view.ids) + 2)
    for place in view.candidates.tolist():
        token = int(view.ids[place])
        raw[place] = counts[token] ** -rarity if token in changed else 0.0
    return [raw[at] + spread * (raw[at - 1] + raw[at + 1]) for at in view.candidates.tolist()]


tokens = st.lists(st.integers(0, 9), max_size=12)
pieces = st.lists(st.tuples(tokens, tokens, tokens), min_size=1, max_size=5)


@settings(max_examples=50)
@given(pieces=pieces, isolated=st.booleans(), spread=st.sampled_from([0.0, 0.5, 1.0]))
@pytest.mark.parametrize("rarity", [0.0, 1.0, 0.5])
def test_overlap_equals_a_loop_over_tokens(
    pieces: list[Piece], isolated: bool, spread: float, rarity: float
) -> None:
    view = view_of(*pieces, ([], [], [0]), isolated=isolated)
    got = TokenOverlap(spread=spread, rarity=rarity).score(view)
    np.testing.assert_allclose(got, overlap_by_hand(view, spread, rarity), rtol=1e-12)


def test_a_repeated_name_outscores_its_neighbours_and_a_frequent_word() -> None:
    name, the, other = 70, 1, 30
    run = [the, other, other, name, other, the, other, the, other, the, other]
    view = view_of(([name, the], [], run))
    scores = TokenOverlap().score(view)
    places = view.candidates - 2
    assert places[np.argsort(-scores, kind="stable")][:3].tolist() == [3, 4, 2]
    assert scores[places == 3] == 1 / 2 and scores[places == 4] == 1 / 4 + 0.5 * 1 / 5
    assert scores[places == 0] == 1 / 5


def test_words_that_an_edit_keeps_do_not_count_as_changed() -> None:
    view = view_of(([5, 6, 7], [5, 6, 8], [5, 0, 0, 7, 0, 0, 8, 0, 0]))
    scores = TokenOverlap(spread=0).score(view)
    assert np.flatnonzero(scores).tolist() == [3, 6]


def test_removed_words_count_where_nothing_new_stands() -> None:
    view = view_of(([], [], [1] * 4), ([], [8], [0, 8, 0, 8, 0]))
    assert Affinity(fraction=1.0, scores=(TokenOverlap(spread=0),)).select(view).tolist() == [5, 7]


def test_isolated_caches_have_no_old_text_to_compare_with() -> None:
    pieces: tuple[Piece, ...] = (([5, 6], [5, 6], [0, 5, 0, 0]), ([], [], [0]))
    assert not TokenOverlap().score(view_of(*pieces)).any()
    assert TokenOverlap().score(view_of(*pieces, isolated=True)).any()


def test_affinity_takes_the_highest_scores_and_breaks_ties_by_the_lower_position() -> None:
    view = view_of(([9, 8, 8], [], [0, 8, 9, 0, 8, 8, 0, 0, 0, 0]), ([1], [], []))
    by_overlap = (TokenOverlap(spread=0),)
    assert view.candidates.tolist() == [*range(3, 13)]
    assert Affinity(fraction=0.1, scores=by_overlap).select(view).tolist() == [5]
    assert Affinity(fraction=0.2, scores=by_overlap).select(view).tolist() == [4, 5]
    assert Affinity(fraction=0.3, scores=by_overlap).select(view).tolist() == [4, 5, 7]
    assert Affinity(fraction=0.0, scores=by_overlap).select(view).tolist() == []


def test_affinity_leaves_budget_unspent_rather_than_take_an_unrelated_token() -> None:
    view = view_of(([9], [], [0, 0, 9, 0, 0, 0]), ([1], [], []))
    assert Affinity(fraction=1.0).select(view).tolist() == [2, 3, 4]


@settings(max_examples=50)
@given(pieces=pieces, fraction=st.floats(0, 1))
def test_affinity_selects_candidates_in_order_within_its_budget(
    pieces: list[Piece], fraction: float
) -> None:
    view = view_of(*pieces, ([], [], [0]))
    chosen = Affinity(fraction=fraction, scores=(TokenOverlap(), KeyCosine(3))).select(view)
    assert np.isin(chosen, view.candidates).all() and (np.diff(chosen) > 0).all()
    assert len(chosen) <= np.ceil(fraction * len(view.candidates))


EDITED = view_of(([], [], [1, 2, 3]), ([4, 5], [6, 7, 8], list(range(10, 2010))), ([9], [], []))


def test_key_cosine_is_the_best_mean_cosine_over_heads() -> None:
    keys = EDITED.cached_keys(3).double().numpy()
    targets = EDITED.new_keys(3).double().numpy()
    keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
    targets /= np.linalg.norm(targets, axis=-1, keepdims=True)
    expected = np.einsum("chd,uhd->cuh", keys, targets).mean(-1).max(-1)
    assert len(targets) == 3
    np.testing.assert_allclose(KeyCosine(3).score(EDITED), expected, atol=1e-6)


def fail(layer: int) -> Any:
    raise AssertionError("keys were asked for although there is nothing to compare")


def without_keys(view: SelectionView) -> SelectionView:
    return SelectionView(view.ids, view.cached_ids, view.runs, view.edits, fail, fail, fail)


def test_the_key_cosine_asks_for_no_keys_where_nothing_is_new() -> None:
    only_removed = without_keys(view_of(([], [], [1, 2]), ([], [3], [4, 5, 6])))
    assert KeyCosine().score(only_removed).tolist() == [0, 0]
    last_recomputed = without_keys(view_of(([], [], [1, 2]), ([], [3], [4, 5, 6]), ([7], [], [])))
    assert len(KeyCosine().score(replace(last_recomputed, edits=last_recomputed.edits[:1]))) == 3
    no_candidate = without_keys(view_of(([], [], [1, 2]), ([3], [4], [])))
    assert KeyCosine().score(no_candidate).tolist() == []


class Given:
    """A score that is given."""

    def __init__(self, *scores: float) -> None:
        self._scores = np.array(scores)

    def score(self, view: SelectionView) -> Any:
        return self._scores


def test_several_scores_are_combined_by_the_sum_of_their_ranks() -> None:
    view = view_of(([9], [], [0, 0, 0, 0]), ([1], [], []))
    first, second = Given(0.9, 0.2, 0.8, 0.0), Given(0.0, 50.0, 100.0, 0.0)
    for fraction, expected in [(0.25, [3]), (0.5, [1, 3]), (0.75, [1, 2, 3]), (1.0, [1, 2, 3])]:
        assert Affinity(fraction, (first, second)).select(view).tolist() == expected


@pytest.mark.parametrize("knob", ["spread", "rarity"])
def test_a_negative_knob_of_overlap_is_refused(knob: str) -> None:
    with pytest.raises(RequestError, match=knob):
        TokenOverlap(**{knob: -1.0})
