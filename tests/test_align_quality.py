"""How much `align` finds, against an exact dynamic program, difflib, and the edit that was made.

The exact references are quadratic, so their texts are small; large logs are judged by the edit.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import pytest

from cacheslide_agents.prompt.align import align, shared_tokens

Line = list[int]
MIN_RUN = 16


@pytest.fixture(scope="module")
def reference(support: Callable[[str], ModuleType]) -> Any:
    return support("align_reference")


def difflib_matched(new: Sequence[int], old: Sequence[int]) -> int:
    blocks = SequenceMatcher(None, new, old, autojunk=False).get_matching_blocks()
    return sum(block.size for block in blocks if block.size >= MIN_RUN)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def periodic(random: Random) -> Line:
    period = [random.randrange(50) for _ in range(random.choice((1, 2, 3, 7, 17)))]
    return (period * 200)[:200]


def fibonacci(random: Random) -> Line:
    """The word that is repetitive at every scale."""
    shorter, longer = [1], [1, 2]
    while len(longer) < 200 + random.randrange(100):
        shorter, longer = longer, longer + shorter
    return longer[-200:]


def random_bits(random: Random) -> Line:
    return [random.randrange(2) for _ in range(200)]


def copies_with_small_changes(random: Random) -> Line:
    text = [random.randrange(500) for _ in range(40)]
    copies = [list(text) for _ in range(5)]
    for copy in copies:
        copy[random.randrange(40)] = random.randrange(500)
    return [token for copy in copies for token in copy]


def edited(random: Random, tokens: Line, edits: int) -> Line:
    after = list(tokens)
    for _ in range(edits):
        place, length = random.randrange(len(after)), random.choice((1, 2, 5, 20))
        source = random.randrange(len(after))
        new = random.choice(([], after[source : source + length], [900 + place] * length))
        after[place : place + random.choice((0, length))] = new
    return after


@pytest.mark.parametrize(
    "text", [periodic, fibonacci, random_bits, copies_with_small_changes], ids=lambda f: f.__name__
)
def test_on_texts_that_repeat_it_comes_within_16_tokens_an_edit_of_the_exact_optimum(
    reference: Any, text: Callable[[Random], Line]
) -> None:
    matched = optimum = 0
    for seed in range(12):
        random = Random(seed)
        edits, old = random.randrange(1, 6), text(random)
        new = edited(random, old, edits)
        found = align(new, old)
        reference.check_alignment(new, old, found)
        best = reference.most_matched(new, old)
        assert best - 16 * edits <= found.matched <= best + found.prefix
        matched, optimum = matched + found.matched, optimum + best
    assert matched >= 0.97 * optimum


def test_on_unrelated_logs_of_one_kind_it_finds_nearly_all_that_can_be_matched(
    reference: Any,
) -> None:
    matched = optimum = 0
    for seed in range(12):
        random = Random(seed)
        kinds = reference.log_lines(random, 3, 20, fields=2, values=3)
        new, old = (reference.flat(random.choices(kinds, k=12)) for _ in range(2))
        matched += align(new, old).matched
        optimum += reference.most_matched(new, old)
    assert matched >= 0.97 * optimum


@pytest.mark.parametrize(("lines", "edits"), [(100, 1), (100, 3), (100, 5), (800, 5), (800, 20)])
@pytest.mark.parametrize(("fields", "values"), [(0, 1), (1, 2), (1, 3), (3, 2), (3, 50)])
def test_edited_lines_of_a_log_cost_themselves_and_48_tokens_each_at_most(
    reference: Any, lines: int, edits: int, fields: int, values: int
) -> None:
    for seed in range(4):
        random = Random(seed)
        old = reference.log_lines(random, lines, 20, fields, values)
        novel = [[10**6 + 20 * number + place for place in range(20)] for number in range(9)]
        alike = reference.log_lines(random, 9, 20, fields, values)
        lines_to_add = random.choice((novel, alike, old))
        new, put_in = reference.edit_lines(random, old, edits, lines_to_add)
        ids, cached_ids = reference.flat(new), reference.flat(old)
        found = align(ids, cached_ids)
        reference.check_alignment(ids, cached_ids, found)
        assert len(ids) - found.matched <= put_in + 48 * edits


@pytest.mark.parametrize("edits", [3, 10])
def test_a_log_of_two_lines_in_random_order_costs_its_edits_and_48_tokens_each_at_most(
    reference: Any, edits: int
) -> None:
    for seed in range(6):
        random = Random(seed)
        kinds = [[1, 2, 3, line, *range(10, 26)] for line in (4, 5)]
        old = random.choices(kinds, k=300)
        new, put_in = reference.edit_lines(random, old, edits, kinds)
        ids, cached_ids = reference.flat(new), reference.flat(old)
        assert len(ids) - align(ids, cached_ids).matched <= put_in + 48 * edits


def test_on_edited_prose_it_finds_what_difflib_finds(reference: Any, data_dir: Path) -> None:
    prose = [reference.words(row["text"]) for row in rows(data_dir / "text" / "valid.jsonl")[:12]]
    for seed, old in enumerate(prose):
        random = Random(seed)
        new = list(old)
        for _ in range(1 + seed % 5):
            place = random.randrange(len(new))
            new[place : place + random.randrange(30)] = prose[seed - 1][: random.randrange(30)]
        found = align(new, old)
        reference.check_alignment(new, old, found)
        assert found.matched >= difflib_matched(new, old)


def test_on_memory_blocks_that_gain_a_fact_it_finds_what_difflib_finds(
    reference: Any, data_dir: Path
) -> None:
    with_facts = [r for r in rows(data_dir / "msc" / "dev.jsonl") if r["source"] == "msc"]
    for row in with_facts[:12]:
        turns = [turn for session in row["sessions"] for turn in session]
        facts = [turn["fact"] for turn in turns if turn.get("fact")]
        said = "\n".join(f"{turn['speaker']}: {turn['text']}" for turn in turns[:60])
        old, new = (
            reference.words(f"12:0{size % 10}, {size} facts\n" + "\n".join(facts[:size]) + said)
            for size in (4, 5)
        )
        new += reference.words("\nuser: And where do I live?")
        found = align(new, old)
        reference.check_alignment(new, old, found)
        assert found.matched >= difflib_matched(new, old)
        added = len(reference.words(facts[4] + "12:05, 5 facts\n\nuser: And where do I live?"))
        assert len(new) - found.matched <= added + 3 * 48


def trajectory(words: Callable[[str], Line], row: dict[str, Any], turn: int) -> Line:
    """A SWE-agent prompt: all observations but the last five are replaced by a short note."""
    messages = row["messages"][:turn]
    observed = [i for i, m in enumerate(messages) if i >= 2 and m["role"] in ("user", "tool")]
    ids: Line = []
    for index, message in enumerate(messages):
        text = str(message["content"])
        if index in observed[:-5]:
            text = f"Old environment output: ({text.count(chr(10)) + 1} lines omitted)"
        shown = words(text)
        if len(shown) > 200:
            shown = shown[:100] + words("...") + shown[-100:]
        ids += words(f"<|{message['role']}|>\n") + shown
    return ids + words("<|assistant|>\n")


def test_on_agent_turns_that_elide_an_observation_it_finds_what_difflib_finds(
    reference: Any, data_dir: Path
) -> None:
    for row in rows(data_dir / "swe_agent" / "dev.jsonl")[:16]:
        turn = len(row["messages"]) // 2
        new, old = (
            trajectory(reference.words, row, turn),
            trajectory(reference.words, row, turn - 2),
        )
        found = align(new, old)
        reference.check_alignment(new, old, found)
        assert found.matched >= difflib_matched(new, old) > 0
        assert found.matched <= shared_tokens(new, old)


def test_shared_tokens_rank_the_previous_turn_of_the_same_trajectory_first(
    reference: Any, data_dir: Path
) -> None:
    every = rows(data_dir / "swe_agent" / "dev.jsonl")[8:20]
    turns = [len(row["messages"]) // 2 for row in every]
    stored = [
        trajectory(reference.words, row, turn - 2) for row, turn in zip(every, turns, strict=True)
    ]
    for number, (row, turn) in enumerate(zip(every, turns, strict=True)):
        prompt = trajectory(reference.words, row, turn)
        shared = [shared_tokens(prompt, context) for context in stored]
        assert shared.index(max(shared)) == number
