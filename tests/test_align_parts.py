"""The pieces under `align`, each against a plain reimplementation: grams, votes, runs, chains."""

from __future__ import annotations

from itertools import combinations
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheslide_agents.prompt.grams import (
    gram_hashes,
    group_grams,
    pair_grams,
    telling_width,
    widen_grams,
)
from cacheslide_agents.prompt.runs import best_chain, equal_runs
from cacheslide_agents.prompt.votes import Votes, largest

Row = tuple[int, int, int]

few_tokens = st.lists(st.integers(-2, 2), max_size=40)
NO_PAIRS = (np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))


def ints(values: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array(values, dtype=np.int64)


def plain_runs(new: list[int], old: list[int], shift: int, min_run: int) -> list[Row]:
    found: list[Row] = []
    start: int | None = None
    for i in range(len(new) + 1):
        equal = i < len(new) and 0 <= i - shift < len(old) and new[i] == old[i - shift]
        if equal and start is None:
            start = i
        elif not equal and start is not None:
            if i - start >= min_run:
                found.append((start, start - shift, i - start))
            start = None
    return found


def plain_chain(runs: list[Row], min_run: int) -> int:
    """Most tokens of any chain in which a later run loses what it overlaps: by trying all."""
    best = 0
    for size in range(1, len(runs) + 1):
        for chain in combinations(sorted(runs), size):
            total, stop, cached_stop = 0, 0, 0
            for start, cached_start, length in chain:
                cut = max(0, stop - start, cached_stop - cached_start)
                if length - cut < min_run:
                    break
                total += length - cut
                stop, cached_stop = start + length, cached_start + length
            else:
                best = max(best, total)
    return best


@given(few_tokens, st.integers(1, 9))
def test_grams_hash_alike_exactly_where_their_tokens_are_alike(ids: list[int], width: int) -> None:
    hashes = gram_hashes(ints(ids), width).tolist()
    grams = [tuple(ids[i : i + width]) for i in range(len(ids) - width + 1)]
    assert len(hashes) == len(grams)
    assert len(set(zip(hashes, grams, strict=True))) == len(set(hashes)) == len(set(grams))


@given(few_tokens, st.integers(1, 6), st.integers(0, 9))
def test_widened_grams_are_alike_where_the_wider_stretches_are(
    ids: list[int], width: int, more: int
) -> None:
    wider = width + more
    hashes = widen_grams(gram_hashes(ints(ids), width), width, wider).tolist()
    grams = [tuple(ids[i : i + wider]) for i in range(len(ids) - wider + 1)]
    assert len(set(zip(hashes, grams, strict=True))) == len(set(hashes)) == len(set(grams))
    assert len(hashes) == len(grams)


@given(st.permutations(range(16)))
def test_grams_of_tokens_in_another_order_hash_apart(ids: list[int]) -> None:
    hashes = {int(gram_hashes(ints(order), 16)[0]) for order in (range(16), ids)}
    assert len(hashes) == len({tuple(range(16)), tuple(ids)})


def test_grams_do_not_depend_on_where_they_stand() -> None:
    left, right = gram_hashes(ints([9, 1, 2, 3, 4]), 3), gram_hashes(ints([1, 2, 3, 7]), 3)
    assert left[1] == right[0]


@given(few_tokens, few_tokens)
def test_pairs_are_counted_from_the_front_and_from_the_back(new: list[int], old: list[int]) -> None:
    expected = []
    for token in set(new):
        here = [i for i, other in enumerate(new) if other == token]
        there = [j for j, other in enumerate(old) if other == token]
        expected += list(zip(here, there, strict=False))
        expected += list(zip(here[::-1], there[::-1], strict=False))
    i, j = pair_grams(gram_hashes(ints(new), 1), gram_hashes(ints(old), 1))
    assert sorted(zip(i.tolist(), j.tolist(), strict=True)) == sorted(expected)


@given(few_tokens, few_tokens)
def test_groups_hold_every_gram_that_occurs_twice(new: list[int], old: list[int]) -> None:
    where, starts, in_new, in_old = group_grams(
        gram_hashes(ints(new), 1), gram_hashes(ints(old), 1)
    )
    both = new + old
    expected = {tuple(i for i, t in enumerate(both) if t == token) for token in set(both)}
    sizes = (in_new + in_old).tolist()
    groups = [
        tuple(where[s : s + size].tolist()) for s, size in zip(starts.tolist(), sizes, strict=True)
    ]
    assert set(groups) == {group for group in expected if len(group) > 1}
    assert in_new.tolist() == [sum(i < len(new) for i in group) for group in groups]


def test_the_telling_width_grows_with_the_distance_between_places_that_differ() -> None:
    ordinary = ints(range(2000))
    assert telling_width(gram_hashes(ordinary, 16), 16) == 16
    random = Random(0)
    log = ints(
        [token for _ in range(400) for token in (1, 2, 3, random.randrange(2), *range(9, 25))]
    )
    assert telling_width(gram_hashes(log, 16), 16) in (128, 256)
    same = ints([1] * 2000)
    assert telling_width(gram_hashes(same, 16), 16) == 256


@given(few_tokens, few_tokens, st.integers(1, 5), st.sets(st.integers(-45, 45)))
def test_equal_runs_are_those_of_a_token_by_token_scan(
    new: list[int], old: list[int], min_run: int, shifts: set[int]
) -> None:
    possible = sorted(shift for shift in shifts if -len(old) < shift < len(new))
    found = equal_runs(ints(new), ints(old), ints(possible), min_run)
    expected = [run for shift in possible for run in plain_runs(new, old, shift, min_run)]
    assert sorted(map(tuple, found.tolist())) == sorted(expected)


def test_equal_runs_of_long_sequences_are_found_in_every_block() -> None:
    ids = ints(np.random.default_rng(0).integers(0, 3, 50_000))
    plain, shifts = ids.tolist(), ints([-3, 0, 5])
    expected = [run for shift in (-3, 0, 5) for run in plain_runs(plain, plain, shift, 7)]
    assert [tuple(row) for row in equal_runs(ids, ids, shifts, 7).tolist()] == expected
    assert {start - cached_start for start, cached_start, _ in expected} == {-3, 0, 5}


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30), st.integers(4, 20)), max_size=7),
    st.integers(1, 4),
)
def test_a_chain_is_as_heavy_as_any_apart_from_a_token_a_seam(
    runs: list[Row], min_run: int
) -> None:
    chain = best_chain(ints(runs).reshape(-1, 3), min_run)
    stop = cached_stop = 0
    for start, cached_start, length in chain.tolist():
        assert start >= stop and cached_start >= cached_stop and length >= min_run
        stop, cached_stop = start + length, cached_start + length
    best = plain_chain(runs, min_run)
    assert best - len(runs) <= chain[:, 2].sum() <= best


def test_of_two_equally_heavy_chains_the_one_with_fewer_runs_wins() -> None:
    runs = ints([(0, 5, 20), (20, 0, 10), (30, 12, 10)])
    assert best_chain(runs, 4).tolist() == [[0, 5, 20]]


def test_votes_go_to_the_shift_of_what_was_moved() -> None:
    new, old = ints([*range(5), *range(50, 90)]), ints(range(50, 90))
    votes = Votes.cast(gram_hashes(new, 4), gram_hashes(old, 4), 4, NO_PAIRS)
    assert votes.shifts(10).tolist() == [5]
    assert sorted(set(votes.paired.tolist())) == list(range(5, 42))
    inside, outside = (5, 0, 40), (0, 2, 5)
    assert votes.on(ints([inside, outside])).tolist() == [2 * 37, 0]


def test_known_pairs_outvote_grams_that_repeat() -> None:
    same = gram_hashes(ints([1] * 20), 4)
    known = (ints(range(15)), ints(range(3, 18)))
    assert Votes.cast(same, same, 4, NO_PAIRS).shifts(1).tolist() == [0]
    assert Votes.cast(same, same, 4, known).shifts(1).tolist() == [-3]


@pytest.mark.parametrize(("most", "expected"), [(1, [40]), (2, [20, 40]), (9, [10, 20, 30, 40])])
def test_the_largest_rows_are_those_of_largest_size(most: int, expected: list[int]) -> None:
    rows, sizes = ints([10, 20, 30, 40]), ints([1, 5, 2, 9])
    assert sorted(largest(rows, sizes, most).tolist()) == expected


def test_of_equally_heavy_chains_a_later_one_with_fewer_runs_wins_too() -> None:
    runs = ints([(0, 30, 10), (12, 45, 10), (15, 0, 20)])
    assert best_chain(runs, 4).tolist() == [[15, 0, 20]]
