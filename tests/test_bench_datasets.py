"""Input files: what fits is read, what does not is refused with file and line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from cacheslide_agents.bench.datasets import (
    dialogues,
    hotpot_questions,
    reflexion_runs,
    trajectories,
)
from cacheslide_agents.bench.demo import REFLECTIONS, demo_episode, sample_questions
from cacheslide_agents.errors import DataError

QUESTION = {"id": "q", "question": "Who?", "answer": "me", "paragraphs": []}


@pytest.fixture
def data(support: Callable[[str], ModuleType], tmp_path: Path) -> Path:
    folder: Path = support("tiny_data").write_tiny_data(tmp_path)
    return folder


def test_every_file_is_read_in_order(data: Path) -> None:
    assert [one.id for one in hotpot_questions(data / "hotpotqa/dev.jsonl")][:2] == ["q0", "q1"]
    runs = reflexion_runs(data / "hotpotqa/reflexion_dev.jsonl")
    assert [trial.reflections for trial in runs[0].trials][-1] == ("Look twice.", "Ask.")
    talk, short = dialogues(data / "msc/dev.jsonl")
    assert [turn.fact for turn in talk.sessions[0]] == [
        None,
        "I own boat 0.1.",
        *[None] * 3,
        "I own boat 0.5.",
    ]
    assert short.memory == (("I bake.",), ("I sing.", "I rest."))
    long, brief = trajectories(data / "swe_agent/dev.jsonl")
    assert (len(long.messages), len(brief.messages)) == (26, 12)
    assert long.messages[2].tool_calls == (("bash", '{"command": "run 1"}'),)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"dev\.jsonl:2: not JSON"),
        ("[]", r"dev\.jsonl:2 must be a JSON object, not a list"),
        (json.dumps(QUESTION | {"answer": None}), r":2: 'answer' is a NoneType; it must be a str"),
        (json.dumps({"id": "q"}), r":2: 'question' is missing; it must be a str"),
        (
            json.dumps(QUESTION | {"paragraphs": [{"title": "A", "text": "a"}, "b"]}),
            r":2: paragraphs\[1\] must be a JSON object",
        ),
        (
            json.dumps(QUESTION | {"paragraphs": [{"title": "A"}]}),
            r":2: paragraphs\[0\]: 'text' is missing",
        ),
    ],
)
def test_a_malformed_row_is_refused_with_file_and_line(
    tmp_path: Path, line: str, message: str
) -> None:
    path = tmp_path / "dev.jsonl"
    path.write_text(f"{json.dumps(QUESTION)}\n{line}\n", encoding="utf-8")
    with pytest.raises(DataError, match=message):
        hotpot_questions(path)


@pytest.mark.parametrize(
    ("read", "row", "message"),
    [
        (reflexion_runs, {"trials": [{"trial": 1, "reflections": [1]}]}, "must hold strings only"),
        (dialogues, {"sessions": [[{"speaker": 1}]]}, r"sessions\[0\]: turns\[0\]: 'speaker'"),
        (trajectories, {"messages": [{"role": "user", "tool_calls": [{}]}]}, r"tool_calls\[0\]"),
    ],
)
def test_a_fault_deep_in_a_row_is_named(
    tmp_path: Path, read: Callable[[Path], Any], row: dict[str, Any], message: str
) -> None:
    known = {"id": "x", "hotpotqa_id": "q", "problem_statement": "p", "questions": []}
    path = tmp_path / "dev.jsonl"
    path.write_text(json.dumps(known | row), encoding="utf-8")
    with pytest.raises(DataError, match=message):
        read(path)


@pytest.mark.parametrize("content", [None, b"", b"\xff\xfe\n"], ids=["missing", "empty", "binary"])
def test_a_file_that_cannot_be_used_is_a_data_error(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "dev.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=r"dev\.jsonl"):
        trajectories(path)


def test_line_separators_inside_a_string_do_not_split_a_row(tmp_path: Path) -> None:
    path = tmp_path / "dev.jsonl"
    row = QUESTION | {"answer": "one\u2028two\x85three"}
    path.write_text(json.dumps(row, ensure_ascii=False), encoding="utf-8")
    assert hotpot_questions(path)[0].answer == "one\u2028two\x85three"


def test_the_package_ships_three_questions_of_ten_passages() -> None:
    questions = sample_questions()
    assert [len(one.paragraphs) for one in questions] == [10, 10, 10]
    assert [one.answer for one in questions] == ["M. Night Shyamalan", "John Ford", "Jimmy Ellis"]


def test_the_demo_episode_grows_by_one_reflection_a_trial_and_changes_nothing_else() -> None:
    trials = [{c.id: c.text for c in one.chunks()} for one in demo_episode(1).prompts()]
    assert len(trials) == 3
    for known, trial in enumerate(trials):
        assert [text in trial["reflections"] for text in REFLECTIONS] == [known > 0, known > 1]
        assert trial | {"reflections": ""} == trials[0] | {"reflections": ""}


def test_a_live_reflection_is_asked_for_after_the_answer() -> None:
    episode = demo_episode()
    asked = episode.reflect((), "Steven Spielberg")
    assert asked.messages[:-2] == episode.prompt(()).messages
    assert [message.role for message in asked.messages[-2:]] == ["assistant", "user"]
    assert asked.messages[-2].content == "Steven Spielberg"


def test_a_question_the_package_does_not_ship_is_a_data_error() -> None:
    with pytest.raises(DataError, match="no sample question 3; choose 0 to 2"):
        demo_episode(3)
