"""Properties of `align` on documents made of few lines, which repeat, and of many, which do not."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from random import Random
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheslide_agents.prompt.align import align, shared_tokens

Line = list[int]
Edits = list[tuple[str, int, int]]


@pytest.fixture(scope="module")
def reference(support: Callable[[str], ModuleType]) -> Any:
    return support("align_reference")


# Documents are lines drawn from a pool: a pool of one to four gives highly repetitive text.
lines_of_few = st.lists(
    st.lists(st.integers(0, 3), min_size=1, max_size=25), min_size=1, max_size=4
)
documents = st.tuples(lines_of_few, st.lists(st.integers(0, 3), min_size=1, max_size=60))
operations = st.sampled_from(("insert", "delete", "replace"))
edits_of_few = st.lists(
    st.tuples(operations, st.integers(0, 59), st.integers(0, 5)),
    max_size=5,
)


def edited(pool: list[Line], order: list[int], edits: Edits) -> tuple[Line, Line, int]:
    """The document, the document after the edits, and the tokens that these put in.

    An edit puts in a line of the pool, or (from 4 on) one of tokens seen nowhere else.
    """
    lines = [pool[index % len(pool)] for index in order]
    after, put_in = list(lines), 0
    for number, (operation, place, kind) in enumerate(edits):
        place %= len(after) + 1
        novel = [10**6 + 12 * number + offset for offset in range(12)]
        line = novel if kind >= 4 else pool[kind % len(pool)]
        added = [] if operation == "delete" else [line]
        after[place : place + (operation != "insert")] = added
        put_in += sum(map(len, added))
    return [*chain(*lines)], [*chain(*after)], put_in


@settings(max_examples=150)
@given(documents, documents, edits_of_few, st.sampled_from((1, 3, 16, 40)))
def test_runs_are_equal_ordered_disjoint_and_maximal(
    reference: Any,
    document: tuple[list[Line], list[int]],
    other: tuple[list[Line], list[int]],
    edits: Edits,
    min_run: int,
) -> None:
    old, new, _ = edited(*document, edits)
    unrelated, _, _ = edited(*other, [])
    for left, right in ((new, old), (old, new), (unrelated, new)):
        found = align(left, right, min_run=min_run)
        reference.check_alignment(left, right, found, min_run)
        assert found.matched <= shared_tokens(left, right, min_run=min_run)


@settings(max_examples=150)
@given(documents, edits_of_few)
def test_an_edit_of_repetitive_text_costs_its_line_and_48_tokens_at_most(
    document: tuple[list[Line], list[int]], edits: Edits
) -> None:
    old, new, put_in = edited(*document, edits)
    assert len(new) - align(new, old).matched <= put_in + 48 * len(edits)


@settings(max_examples=100)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=60), edits_of_few, st.integers(0, 2**32))
def test_an_edit_of_ordinary_text_costs_its_line_and_48_tokens_at_most(
    lengths: list[int], edits: Edits, seed: int
) -> None:
    random = Random(seed)
    pool = [[int(400 * random.random() ** 3) for _ in range(length)] for length in lengths]
    old, new, put_in = edited(pool, list(range(len(pool))), edits)
    assert len(new) - align(new, old).matched <= put_in + 48 * len(edits)
