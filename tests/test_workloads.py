"""The four workloads on a few rows of our own, with words and characters for tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from difflib import SequenceMatcher
from pathlib import Path
from types import ModuleType

import pytest

from cacheslide_agents.bench.workloads import TASKS, Limits, Turn, cut_middle, load_turns
from cacheslide_agents.bench.workloads.append import FEEDBACK
from cacheslide_agents.chunks import Chunk, ChunkedPrompt
from cacheslide_agents.errors import DataError


def words(text: str) -> int:
    return len(text.split())


def prompt_words(prompt: ChunkedPrompt) -> int:
    return sum(words(message.content) for message in prompt.messages)


LIMITS = Limits(words, prompt_words, max_prompt_tokens=4096)


@pytest.fixture
def data(support: Callable[[str], ModuleType], tmp_path: Path) -> Path:
    folder: Path = support("tiny_data").write_tiny_data(tmp_path)
    return folder


def chunks(prompt: ChunkedPrompt) -> dict[str, Chunk]:
    return {chunk.id: chunk for chunk in prompt.chunks()}


def changed(turn: Turn) -> set[str]:
    old, new = chunks(turn.populate), chunks(turn.measure)
    return {name for name in old | new if old.get(name) != new.get(name)}


def edits(turn: Turn) -> list[tuple[str, str]]:
    """(removed, added) text, line by line, from turn t-1 to turn t."""
    old, new = (
        "\n".join(f"[{m.role}]\n{m.content}" for m in prompt.messages).splitlines()
        for prompt in (turn.populate, turn.measure)
    )
    return [
        ("\n".join(old[a:b]), "\n".join(new[c:d]))
        for kind, a, b, c, d in SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
        if kind != "equal"
    ]


def by_turn(task: str, data: Path, limits: Limits = LIMITS) -> dict[tuple[str, int], Turn]:
    return {(turn.id, turn.turn): turn for turn in load_turns(task, data, limits)}


def test_reflexion_measures_every_trial_whose_reflections_changed(data: Path) -> None:
    turns = by_turn("reflexion", data)
    assert set(turns) == {("q0:react", 2), ("q0:react", 4)}
    for turn in turns.values():
        assert changed(turn) == {"reflections"}
        assert (turn.task, turn.answers) == ("reflexion", ("the Brook 0",))
    assert edits(turns["q0:react", 4]) == [("", "- Ask.")]


def test_reflexion_shows_all_passages_and_eight_examples_that_no_run_asks(data: Path) -> None:
    prompt = chunks(by_turn("reflexion", data)["q0:react", 2].measure)
    assert all(f"Mill 0.{part} stands by water." in prompt["context"].text for part in range(10))
    shown = [n for n in range(11) if f"past mill {n}?" in prompt["examples"].text]
    assert shown == [2, 3, 4, 5, 6, 7, 8, 9]


def test_memgpt_adds_one_fact_changes_the_header_and_appends_an_exchange(data: Path) -> None:
    turn = by_turn("memgpt", data)["talk:1", 12]
    assert turn.answers == ("boats",)
    removed = [old for old, _ in edits(turn)]
    added = [new for _, new in edits(turn)]
    assert removed[0].count("\n") == added[0].count("\n") == 3  # time stamp and three counters
    assert (removed[1], added[1]) == ("", "Speaker 2: I own boat 3.1.")
    assert removed[2] == ""
    assert added[2].startswith("Speaker 1: Session 3, line 4.")
    assert added[2].splitlines()[1].startswith("Speaker 2: Session 3, line 5.")
    assert len(edits(turn)) == 3


def scaled(factor: float) -> Limits:
    return replace(LIMITS, prompt=lambda prompt: int(factor * prompt_words(prompt)))


def test_memgpt_shows_two_sessions_and_more_only_until_the_prompt_is_long_enough(
    data: Path,
) -> None:
    three = by_turn("memgpt", data)["talk:1", 12]  # two sessions make 1262 words
    two = by_turn("memgpt", data, scaled(1.1))["talk:1", 12]
    for turn, hidden, shown in ((three, 0, 1), (two, 1, 2)):
        for prompt in (turn.populate, turn.measure):
            text = prompt.messages[-1].content
            assert f"Session {shown}, line 0." in text
            assert f"Session {hidden}, line 5." not in text
    assert 1300 <= prompt_words(three.measure) < 1700


def test_memgpt_leaves_out_what_cannot_reach_its_least_length(data: Path) -> None:
    assert {name for name, _ in by_turn("memgpt", data)} == {"talk:1", "talk:2"}


def test_facts_of_a_dialogue_without_notes_name_their_speakers(data: Path) -> None:
    turn = by_turn("memgpt", data, scaled(3))["short:1", 1]
    facts = "Speaker 1: I bake.\nSpeaker 2: I sing.\nSpeaker 2: I rest."
    assert facts in chunks(turn.measure)["memory"].text
    assert edits(turn)[1] == ("", "Speaker 2: I rest.")


def test_swe_agent_measures_a_third_half_and_two_thirds_but_always_an_elision(data: Path) -> None:
    turns = by_turn("swe_agent", data)
    assert set(turns) == {("long", 6), ("long", 8)}  # a third is 4 exchanges: nothing to elide
    old, note = edits(turns["long", 8])[0]
    assert old == "Output:\noutput 3, line 0\noutput 3, line 1\noutput 3, line 2"
    assert note == "Old output omitted (3 lines)."


def test_swe_agent_appends_one_exchange_and_shows_the_last_five_outputs(data: Path) -> None:
    turn = by_turn("swe_agent", data)["long", 8]
    roles = [message.role for message in turn.populate.messages]
    assert [message.role for message in turn.measure.messages] == [*roles, "assistant", "user"]
    text = "".join(message.content for message in turn.measure.messages)
    assert [n for n in range(1, 13) if f"output {n}, line 0" in text] == [4, 5, 6, 7, 8]
    assert [n for n in range(1, 13) if f"Step {n}.\n\nbash {{" in text] == list(range(1, 9))


def test_swe_agent_drops_the_oldest_exchanges_to_fit_the_window(data: Path) -> None:
    whole = by_turn("swe_agent", data)["long", 8]
    window = prompt_words(whole.measure) - 1
    tight = by_turn("swe_agent", data, replace(LIMITS, max_prompt_tokens=window))["long", 8]
    assert prompt_words(tight.measure) <= window
    kept = set(chunks(whole.measure)) - set(chunks(tight.measure))
    assert kept == {"step-1-action", "step-1-output"}


def test_swe_agent_leaves_out_a_turn_whose_elision_is_outside_the_window(data: Path) -> None:
    whole = by_turn("swe_agent", data)["long", 8]
    window = prompt_words(whole.measure) - 40
    tight = replace(LIMITS, max_prompt_tokens=window)
    assert ("long", 8) not in by_turn("swe_agent", data, tight)


def test_swe_agent_cuts_a_long_message_and_a_long_issue_in_the_middle(
    support: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    tiny = support("tiny_data")
    folder = tiny.write_tiny_data(tmp_path)
    issue = " ".join(f"i{n}" for n in range(3000))
    row = tiny.trajectory("cut", 12, issue)
    row["messages"][2 * 8 + 1]["content"] = " ".join(f"o{n}" for n in range(2000))
    (folder / "swe_agent" / "dev.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    found = chunks(by_turn("swe_agent", folder)["cut", 8].measure)
    output = found["step-8-output"].text
    assert "o0 o1 " in output
    assert "o1999" in output
    assert "o1000" not in output
    assert 590 <= words(output) <= 600 + words("Output:")
    assert found["system"].text.startswith("You fix code.")
    assert "<issue>\ni0 i1 " in found["issue"].text
    assert "i2999\n</issue>" in found["issue"].text
    shown = found["issue"].text.split("<issue>")[1].split("</issue>")[0]
    assert 1190 <= words(found["system"].text) + words(shown) <= 1200


def test_append_changes_nothing_of_the_previous_prompt(data: Path) -> None:
    turns = load_turns("append", data, LIMITS)
    assert {turn.task for turn in turns} == {"reflexion", "memgpt", "swe_agent"}
    for turn in turns:
        before = turn.populate.messages
        assert turn.measure.messages[: len(before)] == before
        roles = [message.role for message in turn.measure.messages[len(before) :]]
        assert roles == ["assistant", "user"]


def test_append_brings_feedback_another_question_or_an_output(data: Path) -> None:
    turns = by_turn("append", data)
    ends = {name: [m.content for m in turn.measure.messages[-2:]] for name, turn in turns.items()}
    assert ends["reflexion/q0:react", 2][0] == "Give up."
    assert ends["reflexion/q0:react", 3] == ["Rhine", FEEDBACK]
    assert ends["memgpt/talk:1", 12] == ["boats", "Question: Who rows?"]
    assert turns["memgpt/talk:1", 12].answers == ("Speaker 1",)
    assert ends["swe_agent/long", 6][0] == 'Step 6.\n\nbash {"command": "run 6"}'
    assert ends["swe_agent/long", 6][1].startswith("Output:\noutput 6, line 0\n")


@pytest.mark.parametrize("task", TASKS)
def test_fewer_rows_are_the_first_of_more_rows_and_the_seed_decides_which(
    task: str, data: Path
) -> None:
    every = load_turns(task, data, LIMITS, seed=3)
    assert load_turns(task, data, LIMITS, limit=2, seed=3) == every[:2]
    orders = {
        tuple(t.id + str(t.turn) for t in load_turns(task, data, LIMITS, seed=s)) for s in range(9)
    }
    assert len(orders) > 1
    assert {tuple(sorted(order)) for order in orders} == {tuple(sorted(next(iter(orders))))}


@pytest.mark.parametrize(
    ("task", "limit", "window", "message"),
    [
        ("chess", None, 4096, "no workload named 'chess'; known: reflexion, memgpt"),
        ("reflexion", 0, 4096, "limit=0 must be at least 1"),
        ("reflexion", None, 20, "fits 20 tokens; raise --max-prompt-tokens"),
    ],
)
def test_impossible_wishes_are_data_errors(
    data: Path, task: str, limit: int | None, window: int, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        load_turns(task, data, replace(LIMITS, max_prompt_tokens=window), limit=limit)


def test_a_cut_keeps_both_ends_of_the_whole_and_notes_what_is_missing() -> None:
    first, second = cut_middle(("a" * 400, "b" * 1600), 600, len)
    head = re.fullmatch(r"(a+)\n\[\.\.\. (\d+) characters left out \.\.\.\]\n", first)
    assert head is not None
    assert set(second) == {"b"}
    assert len(head[1]) == len(second) or len(head[1]) + 1 == len(second)
    assert len(head[1]) + int(head[2]) + len(second) == 2000
    assert 580 <= len(first) + len(second) <= 600


def test_a_text_within_the_limit_is_not_cut() -> None:
    assert cut_middle(("one two", "three"), 12, len) == ("one two", "three")
