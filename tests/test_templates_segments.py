"""What the packaged templates can hold: blocks, queues, demonstrations, rounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cacheslide_agents.chunks import ChunkedPrompt, Role
from cacheslide_agents.prompt.auto import chunk_messages
from cacheslide_agents.prompt.chat import ChatEncoder
from cacheslide_agents.prompt.compare import compare
from cacheslide_agents.prompt.template import PromptTemplate

FUNCTIONS = [{"name": "recall_search", "description": "Search.", "parameters": {}}]
MEMGPT = {"timestamp": "noon", "counters": {"messages": 9}, "functions": FUNCTIONS}
REACT = {
    "examples": [{"question": "Who?", "trajectory": "Thought 1: easy\nAction 1: Finish[Ann]"}],
    "reflections": ["look closer"],
    "question": "Where?",
}
ROUND = {"thought": "I need the town.", "action": "Search[Vik]", "observation": "A village."}
SWE = {
    "system": "You code.",
    "issue": "It breaks.",
    "history": [{"role": "assistant", "text": "ls"}, {"role": "user", "text": "a.py"}],
}


def render(name: str, **values: Any) -> ChunkedPrompt:
    return PromptTemplate.named(name).render(**values)


def texts(prompt: ChunkedPrompt) -> dict[str, str]:
    return {chunk.id: chunk.text for chunk in prompt.chunks()}


def test_memgpt_shows_blocks_and_how_full_they_are() -> None:
    blocks = {"persona": "I am Sam.", "human": "Ann.\nShe sails."}
    history = [{"role": "user", "text": "Hi"}]
    memory = texts(render("memgpt", **MEMGPT, **blocks, block_limit=200, history=history))["memory"]
    assert memory == (
        "### Memory [last changed noon]\nmessages: 9\n"
        '<persona characters="9/200">\nI am Sam.\n</persona>\n'
        '<human characters="15/200">\nAnn.\nShe sails.\n</human>\n\n'
    )
    plain = texts(render("memgpt", **MEMGPT, **blocks, history=history))["memory"]
    assert "<persona>\nI am Sam.\n</persona>\n<human>\n" in plain
    assert "core" not in plain


def test_memgpt_keeps_facts_beside_blocks_when_there_are_facts() -> None:
    values = {"human": "Ann.", "facts": ["She sails."], "history": []}
    memory = texts(render("memgpt", **MEMGPT, **values))["memory"]
    assert memory.endswith("<human>\nAnn.\n</human>\n<core>\nShe sails.\n</core>\n\n")


def test_memgpt_queue_becomes_messages_that_take_turns() -> None:
    history = [
        {"role": "user", "text": "Where do I live?"},
        {"role": "assistant", "text": "recall_search(Oslo)"},
        {"role": "tool", "text": "You live in Oslo."},
        {"role": "user", "text": "Well?", "id": "u4"},
        {"role": "assistant", "text": "In Oslo."},
    ]
    prompt = render("memgpt", **MEMGPT, persona="Sam", history=history, summary="boats")
    roles = [message.role for message in prompt.messages]
    assert roles == ["system", "user", "assistant", "user", "assistant"]
    assert [message.content for message in prompt.messages[1:]] == [
        "Older messages are out of view. They were about this: boats\nWhere do I live?",
        "recall_search(Oslo)",
        "Returned: You live in Oslo.\nWell?",
        "In Oslo.",
    ]
    hints = {chunk.id: chunk.role for chunk in prompt.chunks()}
    assert list(hints)[3:] == [
        "summary",
        "message-1",
        "message-2",
        "message-3",
        "message-u4",
        "message-5",
    ]
    assert (hints["summary"], hints["message-u4"]) == (Role.RECOMPUTE, Role.REUSE)


def test_memgpt_messages_keep_their_names_when_older_ones_leave(
    tokenizers: Callable[[str], Any],
) -> None:
    talk = [
        {"role": ("user", "assistant")[n % 2], "text": f"Line {n} of a long talk.", "id": n}
        for n in range(12)
    ]
    encode = ChatEncoder(tokenizers("qwen")).encode
    whole, late = (
        encode(render("memgpt", **MEMGPT, persona="Sam", history=talk[first:])) for first in (0, 4)
    )
    states = {one.id: one.state for one in compare(whole, late).segments}
    assert {states[f"message-{n}"] for n in range(5, 12)} == {"moved"}
    assert {states[f"message-{n}"] for n in range(4)} == {"removed"}


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ([2, ...], ["2", "at-2"]),
        ([..., "1", 0], ["at-1", "1", "0"]),
        ([None, "", ..., None], ["1", "2", "3", "4"]),
        ([None, 5, "x", ..., ...], ["1", "5", "x", "4", "at-5"]),
    ],
    ids=str,
)
@pytest.mark.parametrize(("name", "prefix"), [("memgpt", "message"), ("swe_agent", "step")])
def test_entries_without_an_id_keep_clear_of_those_with_one(
    name: str, prefix: str, given: list[Any], names: list[str]
) -> None:
    history = [
        {"role": ("user", "assistant")[n % 2], "text": f"line {n}"}
        | ({} if one is ... else {"id": one})
        for n, one in enumerate(given)
    ]
    values = {**MEMGPT, "persona": "Sam", "summary": "boats"} if name == "memgpt" else SWE
    shown = texts(render(name, **{**values, "history": history}))
    found = {one: text for one, text in shown.items() if one.startswith(f"{prefix}-")}
    assert list(found) == [f"{prefix}-{one}" for one in names]
    assert [text.split("line ")[1].strip() for text in found.values()] == [
        str(n) for n in range(len(given))
    ]


def test_swe_agent_shows_a_demonstration_before_the_issue_and_the_state_after_the_output() -> None:
    extras = {"demonstration": "$ ls\nb.py", "state": "(Current directory: /repo)"}
    prompt = render("swe_agent", **SWE, **extras)
    assert [chunk.id for chunk in prompt.chunks()] == [
        "system",
        "demonstration",
        "issue",
        "step-1",
        "step-2",
        "state",
        "cue",
    ]
    assert "<demonstration>\n$ ls\nb.py\n</demonstration>" in texts(prompt)["demonstration"]
    assert texts(prompt)["state"] == "(Current directory: /repo)\n"
    plain = texts(render("swe_agent", **SWE))
    assert texts(prompt).items() - plain.items() == {
        (name, texts(prompt)[name]) for name in ("demonstration", "state")
    }


@pytest.mark.parametrize("history", [[], SWE["history"][:1], SWE["history"]])
def test_swe_agent_ends_with_state_and_cue_in_a_user_message(history: Any) -> None:
    prompt = render("swe_agent", **{**SWE, "history": history}, state="$")
    last = prompt.messages[-1]
    assert last.role == "user"
    assert [chunk.id for chunk in last.chunks][-2:] == ["state", "cue"]


def test_react_numbers_its_rounds_and_asks_for_the_next() -> None:
    prompt = texts(render("reflexion_react", **REACT, steps=[ROUND, ROUND]))
    assert prompt["step-2"] == (
        "Thought 2: I need the town.\nAction 2: Search[Vik]\nObservation 2: A village.\n"
    )
    assert prompt["cue"] == "Thought 3:"
    assert "Question: Who?\nThought 1: easy\nAction 1: Finish[Ann]\n" in prompt["examples"]


def test_react_shows_the_lessons_and_the_last_trial_before_the_question() -> None:
    prompt = render("reflexion_react", **REACT, steps=[], last_trial="Thought 1: guess")
    said = texts(prompt)
    assert list(said) == ["instruction", "examples", "reflections", "question", "cue"]
    assert "- look closer\n" in said["reflections"]
    assert "<trial>\nThought 1: guess\n</trial>" in said["reflections"]
    first = texts(render("reflexion_react", **{**REACT, "reflections": []}, steps=[]))
    assert first["reflections"] == "This is your first trial at the question.\n\n"


def test_reflexion_takes_the_last_attempt_and_the_reasoning_so_far() -> None:
    values: dict[str, Any] = {"examples": [], "paragraphs": [], "question": "Who?"}
    plain = texts(render("reflexion", **values, reflections=[]))
    fuller = texts(
        render("reflexion", **values, reflections=[], last_attempt="Bob?", thought="Ann?")
    )
    assert fuller["reflections"].count("<attempt>\nBob?\n</attempt>") == 1
    assert "first attempt" not in fuller["reflections"]
    assert fuller["cue"] == f"Your reasoning so far: Ann?\n{plain['cue']}"
    assert plain["cue"].endswith("Answer:")


def test_strict_chat_templates_take_every_template(tokenizers: Callable[[str], Any]) -> None:
    """Mistral's insists that user and assistant take turns."""
    encoder = ChatEncoder(tokenizers("mistral"))
    history = [{"role": "user", "text": "a"}, {"role": "tool", "text": "b"}]
    for prompt in (
        render("memgpt", **MEMGPT, persona="Sam", history=history, summary="boats"),
        render("swe_agent", **SWE, demonstration="d", state="s"),
        render("reflexion_react", **REACT, steps=[ROUND]),
    ):
        encoded = encoder.encode(prompt)
        plain = chunk_messages(
            [{"role": message.role, "content": message.content} for message in prompt.messages]
        )
        assert encoded.ids == encoder.encode(plain).ids
        assert {chunk.id for chunk in prompt.chunks()} <= {span.id for span in encoded.spans}
