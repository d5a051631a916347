"""`align` and `shared_tokens`: what they keep, what they drop, and what an edit costs.

How long they take (2,000 tokens, a log of nearly identical lines, five of them replaced):

    python -m timeit -s "import numpy as np; from cacheslide_agents.prompt.align import align; \
r = np.random.default_rng(0); old = np.arange(2000) % 20; old[3::20] = r.integers(50, 53, 100); \
new = old.copy(); new[343:1943:320] = 60" "align(new, old)"
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cacheslide_agents.chunks import Alignment, Role, Run, Span
from cacheslide_agents.errors import RequestError
from cacheslide_agents.prompt import gaps, runs
from cacheslide_agents.prompt.align import align, shared_tokens

Line = list[int]


@pytest.fixture(scope="module")
def reference(support: Callable[[str], ModuleType]) -> Any:
    return support("align_reference")


def fresh(count: int, seed: int = 0) -> Line:
    """Tokens that occur nowhere else."""
    return [seed * 10_000 + place + 1_000_000 for place in range(count)]


def spans_of(chunks: list[Line]) -> list[Span]:
    spans, start = [], 0
    for number, chunk in enumerate(chunks):
        spans.append(Span(str(number), Role.REUSE, start, start + len(chunk), repr(chunk)))
        start += len(chunk)
    return spans


def joined(*parts: Line) -> Line:
    return [token for part in parts for token in part]


def test_identical_prompts_are_one_run() -> None:
    ids = fresh(100)
    assert align(ids, ids).runs == (Run(0, 0, 100),)
    assert align(ids, ids).edits() == ()


def test_prompts_with_nothing_in_common_have_no_run() -> None:
    found = align(fresh(100, 1), fresh(80, 2))
    assert found == Alignment(100, 80, ())
    assert found.matched == 0


@pytest.mark.parametrize(("length", "cached_length"), [(0, 0), (0, 40), (40, 0)])
def test_empty_sequences_have_no_run(length: int, cached_length: int) -> None:
    found = align(fresh(length), fresh(cached_length))
    assert found == Alignment(length, cached_length, ())
    assert shared_tokens(fresh(length), fresh(cached_length)) == 0


def test_a_short_common_head_is_kept_and_a_short_tail_is_not() -> None:
    head, tail = fresh(3, 1), fresh(15, 2)
    found = align(joined(head, fresh(40, 3), tail), joined(head, fresh(50, 4), tail))
    assert found.runs == (Run(0, 0, 3),)


def test_runs_of_min_run_tokens_are_kept_and_shorter_ones_are_updates() -> None:
    long, short = fresh(16, 1), fresh(15, 2)
    new = joined(fresh(5, 3), long, fresh(5, 4), short, fresh(5, 5))
    old = joined(fresh(7, 6), long, fresh(9, 7), short, fresh(7, 8))
    assert align(new, old).runs == (Run(5, 7, 16),)
    assert align(new, old, min_run=15).runs == (Run(5, 7, 16), Run(26, 32, 15))
    assert align(new, old, min_run=17).runs == ()


def test_a_replaced_line_is_the_whole_update() -> None:
    before, after = fresh(300, 1), fresh(400, 2)
    found = align(joined(before, fresh(9, 3), after), joined(before, fresh(20, 4), after))
    assert found.runs == (Run(0, 0, 300), Run(309, 320, 400))
    assert found.runs[1].shift == -11


def test_insertions_and_deletions_shift_the_rest_either_way() -> None:
    a, b, c = fresh(50, 1), fresh(60, 2), fresh(70, 3)
    found = align(joined(a, fresh(8, 4), b, c), joined(a, b, fresh(30, 5), c))
    assert found.runs == (Run(0, 0, 50), Run(58, 50, 60), Run(118, 140, 70))
    assert [run.shift for run in found.runs] == [0, 8, -22]


def test_of_reordered_chunks_only_those_in_relative_order_are_hits() -> None:
    a, b, c, d = fresh(40, 1), fresh(50, 2), fresh(60, 3), fresh(30, 4)
    found = align(joined(b, a, d, c), joined(a, b, c, d))
    assert found.runs == (Run(0, 40, 50), Run(120, 90, 60))
    assert align(joined(d, c, b, a), joined(a, b, c, d)).runs == (Run(30, 90, 60),)


def test_a_moved_chunk_is_an_edit_unless_it_outweighs_what_it_crosses() -> None:
    small, large = fresh(30, 1), fresh(90, 2)
    assert align(joined(large, small), joined(small, large)).runs == (Run(0, 30, 90),)


def test_a_repeated_cue_is_read_where_it_stood_rather_than_at_the_new_end() -> None:
    history, cue, reply = fresh(100, 1), fresh(20, 2), fresh(40, 3)
    new = joined(fresh(5, 4), history, cue, reply, cue)
    old = joined(fresh(9, 5), history, cue)
    assert align(new, old).runs == (Run(5, 9, 120),)


def test_a_run_takes_the_room_that_a_joined_run_before_it_leaves(reference: Any) -> None:
    new = [0, 3, 2, 0, 0, 1, *[1, 3, 0, 3, 2, 0, 1, 1, 2, 0] * 3]
    old = [1, 0, 1, 1, 3, 0, 0, 3, 2]
    reference.check_alignment(new, old, align(new, old, min_run=1), min_run=1)


def test_more_shifts_than_are_tried_at_once_are_found_gap_by_gap() -> None:
    paragraphs = [fresh(250, number) for number in range(60)]
    new = joined(*(fresh(3, 100 + number) + text for number, text in enumerate(paragraphs)))
    expected = tuple(Run(253 * number + 3, 250 * number, 250) for number in range(60))
    assert align(new, joined(*paragraphs)).runs == expected


def test_equal_tokens_in_a_row_match_up_to_the_shorter_side() -> None:
    assert align([7] * 500, [7] * 300).runs == (Run(0, 0, 300),)
    found = align(joined([7] * 200, fresh(4), [7] * 200), [7] * 400)
    assert found.runs == (Run(0, 0, 200), Run(204, 200, 200))


def test_lists_tuples_and_arrays_give_the_same_alignment() -> None:
    new, old = joined(fresh(50, 1), fresh(40, 2)), joined(fresh(50, 1), fresh(3, 3), fresh(40, 2))
    expected = align(new, old)
    assert len(expected.runs) == 2
    assert align(tuple(new), tuple(old)) == expected
    assert align(np.array(new, dtype=np.int32), np.array(old)) == expected
    assert all(type(number) is int for run in expected.runs for number in (run.start, run.length))


def test_any_integers_are_tokens() -> None:
    ids = [-1, 0, -200, 2**40, -(2**50)] * 8
    found = align([*ids, 5, *ids], [*ids, *ids])
    assert found.runs == (Run(0, 0, 40), Run(41, 40, 40))


def test_wrong_spans_never_make_a_wrong_run(reference: Any) -> None:
    new, old = joined(fresh(60, 1), fresh(40, 2)), joined(fresh(50, 3), fresh(60, 1), fresh(9, 4))
    lies = [Span("a", Role.REUSE, 90, 190, "x"), Span("b", Role.REUSE, 0, 50, "y")]
    cached_lies = [Span("a", Role.REUSE, 10, 110, "x"), Span("b", Role.REUSE, 0, 50, "y")]
    found = align(new, old, spans=lies, cached_spans=cached_lies)
    reference.check_alignment(new, old, found)
    assert found.runs == (Run(0, 50, 60),)


def test_equal_chunks_are_anchors_where_their_text_repeats(reference: Any) -> None:
    gained = 0
    for seed in range(40):
        random = Random(seed)
        kinds = reference.log_lines(random, 3, 8, fields=1, values=3)
        chunks = [joined(*random.choices(kinds, k=random.randrange(3, 12))) for _ in range(40)]
        kept = [chunk for chunk in chunks if random.random() < 0.8]
        new, old = joined(*kept), joined(*chunks)
        found = align(new, old, spans=spans_of(kept), cached_spans=spans_of(chunks))
        reference.check_alignment(new, old, found)
        gained += found.matched - align(new, old).matched
    assert gained > 0


@pytest.mark.parametrize("min_run", [0, -3])
def test_min_run_below_one_is_refused(min_run: int) -> None:
    with pytest.raises(RequestError, match=rf"min_run={min_run} must be at least 1"):
        align([1], [1], min_run=min_run)
    with pytest.raises(RequestError, match="at least 1"):
        shared_tokens([1], [1], min_run=min_run)


@pytest.mark.parametrize("ids", [[[1, 2], [3, 4]], [0.5, 1.0], ["a"], [True]])
def test_ids_that_are_no_flat_sequence_of_integers_are_refused(ids: Any) -> None:
    with pytest.raises(RequestError, match=r"cached_ids is an array of .*; pass one flat"):
        align([1], ids)


def test_grams_that_collide_cost_hits_but_never_a_wrong_token(
    reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def colliding(ids: np.ndarray[Any, Any], width: int) -> np.ndarray[Any, Any]:
        return np.zeros(max(0, len(ids) - width + 1), dtype=np.uint64)

    monkeypatch.setattr(gaps, "gram_hashes", colliding)
    new = joined(fresh(50, 1), fresh(20, 2), fresh(60, 3), fresh(5, 4))
    old = joined(fresh(50, 1), fresh(30, 5), fresh(60, 3))
    reference.check_alignment(new, old, align(new, old))


@pytest.mark.parametrize("tokens", [2_000, 16_000])
def test_work_is_bounded_on_text_that_repeats_everywhere(
    reference: Any, monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    searched: list[int] = []
    equal_runs = runs.equal_runs

    def counted(new: Any, old: Any, shifts: Any, min_run: int) -> Any:
        searched.append(len(new) + len(old))
        return equal_runs(new, old, shifts, min_run)

    monkeypatch.setattr(gaps, "equal_runs", counted)
    random = Random(0)
    new = reference.flat(reference.log_lines(random, tokens // 20, 20, fields=2, values=2))
    old = reference.flat(reference.log_lines(random, tokens // 20, 20, fields=2, values=2))
    found = align(new, old)
    reference.check_alignment(new, old, found)
    assert found.matched > len(new) // 4
    assert sum(searched) <= 3 * (len(new) + len(old)) and len(searched) <= 4 + tokens // 500


def test_shared_tokens_of_equal_and_of_unrelated_prompts_are_all_and_none() -> None:
    assert shared_tokens(fresh(90), fresh(90)) == 90
    assert shared_tokens(fresh(90, 1), fresh(70, 2)) == 0


def test_shared_tokens_ignore_order_and_runs_below_min_run() -> None:
    a, b, short = fresh(40, 1), fresh(50, 2), fresh(10, 3)
    new, old = joined(b, fresh(5, 4), a, short), joined(a, b, short, fresh(5, 5))
    assert shared_tokens(new, old) == 90
    assert align(new, old).matched == 50


@example(copies=3)
@settings(max_examples=20)
@given(st.integers(1, 8))
def test_shared_tokens_count_a_repeated_text_no_more_often_than_the_other_side_has_it(
    copies: int,
) -> None:
    text = fresh(30)
    assert shared_tokens(joined(fresh(4, 1), *[text] * copies), joined(text, fresh(6, 2))) == 30
