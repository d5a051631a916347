"""The MemGPT-style companion with a model that follows a script of function calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import datetime
from types import ModuleType
from typing import Any

import pytest
from langchain_core.messages import BaseMessage
from langgraph.checkpoint.memory import InMemorySaver

from cacheslide_agents.errors import RequestError
from langchain_cacheslide import ChatCacheSlide
from langchain_cacheslide.agents import Companion
from langchain_cacheslide.agents.archive import search
from langchain_cacheslide.agents.function_calls import (
    call_format,
    function_schemas,
    parsed_call,
)
from langchain_cacheslide.agents.memgpt import memgpt_graph
from langchain_cacheslide.agents.memory import MEMORY_TOOLS


def call(name: str, **arguments: Any) -> str:
    return json.dumps({"name": name, "arguments": arguments})


def say(message: str) -> str:
    return call("send_message", message=message)


def words(messages: Sequence[BaseMessage]) -> int:
    return sum(len(message.text.split()) for message in messages)


@pytest.fixture
def companion(support: Callable[[str], ModuleType]) -> Callable[..., tuple[Companion, Any]]:
    support("fake_backend")
    backend_class = support("hinting_backend").HintingBackend

    def make(answers: Sequence[str], **options: Any) -> tuple[Companion, Any]:
        backend = backend_class(answers)
        given = {
            "persona": "I am kind.",
            "human": "Lives in Oslo.",
            "constrained": False,
            "clock": lambda: datetime(2024, 5, 6, 7, 8),
            **options,
        }
        return Companion(ChatCacheSlide(backend=backend), **given), backend

    return make


def last_returned(backend: Any) -> str:
    text: str = backend.prompts()[-1].rpartition("Returned: ")[2]
    return text.partition("<|im_end|>")[0].strip()


def test_fact_is_written_into_the_memory_block_before_the_reply(companion: Any) -> None:
    note = call("core_memory_append", block="human", content="Has a dog.")
    one, backend = companion([note, say("What is it called?")])
    assert one.say("I have a dog.") == "What is it called?"
    assert one.memory()["human"] == "Lives in Oslo.\nHas a dog."
    before, after = backend.prompts()
    assert "Has a dog." not in before.partition("<|im_start|>user")[0]
    assert "Lives in Oslo.\nHas a dog." in after.partition("<|im_start|>user")[0]
    assert "[last changed never]" in before
    assert "[last changed 2024-05-06 07:08]" in after


def test_prompts_carry_the_templates_chunks_and_messages_keep_their_ids(companion: Any) -> None:
    one, backend = companion([call("archival_memory_search", query="x"), say("Hello.")])
    one.say("Hi.")
    first, second = ([span.id for span in request.spans] for request in backend.requests)
    assert first[:3] == ["instruction", "memory", "functions"]
    assert first[:4] == second[:4]
    assert {request.task for request in backend.requests} == {"memgpt"}


def test_fact_is_replaced_and_can_be_forgotten(companion: Any) -> None:
    edits = [
        call("core_memory_replace", block="human", old="Oslo", new="Bergen"),
        call("core_memory_replace", block="persona", old="I am kind.", new=""),
    ]
    one, _ = companion([*edits, say("Bergen!")])
    one.say("I moved to Bergen.")
    assert one.memory() == {"persona": "", "human": "Lives in Bergen.", "archive": []}


@pytest.mark.parametrize(
    ("wrong", "answer"),
    [
        (
            call("core_memory_replace", block="human", old="Rome", new="Bergen"),
            "The human block does not hold 'Rome'; nothing was changed.",
        ),
        (
            call("core_memory_append", block="human", content="x" * 2000),
            "The human block would be 15 characters too long.",
        ),
        (call("archival_memory_search", query="y"), "Nothing is on page 0 for 'y'."),
        (call("archival_memory_search", query="y", page=-1), "Nothing is on page -1 for 'y'."),
        (call("fly", to="Rome"), "Error: fly is not a valid tool"),
        (call("core_memory_append", block="cellar", content="y"), "Error invoking tool"),
        (call("send_message", text="y"), "Error invoking tool"),
    ],
)
def test_wrong_call_is_answered_and_changes_nothing(
    companion: Any, wrong: str, answer: str
) -> None:
    one, backend = companion([wrong, say("Sorry.")])
    before = one.memory()
    assert one.say("Hi.") == "Sorry."
    assert last_returned(backend).startswith(answer)
    assert one.memory() == before
    assert "[last changed never]" in backend.prompts()[-1]


def test_archive_is_written_and_searched(companion: Any) -> None:
    asked = call("archival_memory_search", query="the boats, of my grandfather")
    one, backend = companion(
        [call("archival_memory_insert", content="My grandfather built boats."), asked, say("Yes.")],
        archive=["user: I like tea.", "user: Boats are slow."],
    )
    one.say("Do you remember?")
    assert last_returned(backend) == "My grandfather built boats.\nuser: Boats are slow."


def test_queue_over_its_budget_moves_whole_exchanges_into_the_archive(companion: Any) -> None:
    one, backend = companion(
        [say("First reply."), say("Second reply."), say("Third reply.")],
        queue_tokens=40,
        count_tokens=words,
    )
    for number in ("one", "two", "three"):
        one.say(f"This is message {number} of several, with ten words.")
    assert one.memory()["archive"] == [
        "user: This is message one of several, with ten words.",
        "assistant: First reply.",
    ]
    shown = backend.prompts()[-1]
    assert "message two" in shown
    assert "message one" not in shown


def test_exchange_under_way_stays_in_view_however_long(companion: Any) -> None:
    one, backend = companion([say("Fine.")], queue_tokens=5, count_tokens=words)
    one.say("one two three four five six seven eight nine")
    assert "eight nine" in backend.prompts()[-1]


def test_steps_for_one_message_are_bounded(companion: Any) -> None:
    one, backend = companion([call("archival_memory_search", query="x")], steps=3)
    assert one.say("Hi.") == ""
    assert len(backend.requests) == 3
    with pytest.raises(RequestError, match="steps=0"):
        companion([say("x")], steps=0)


def test_answer_that_is_no_call_is_the_reply(companion: Any) -> None:
    one, _ = companion(["Nice to meet you."])
    assert one.say("Hi.") == "Nice to meet you."


def test_exchanges_of_the_past_are_in_view_from_the_start(companion: Any) -> None:
    one, backend = companion([say("Yes.")], seen=[("I sail.", "Where to?")])
    one.say("To Lofoten.")
    (prompt,) = backend.prompts()
    assert prompt.index("I sail.") < prompt.index("Where to?") < prompt.index("To Lofoten.")


def test_companion_goes_on_with_a_thread_that_another_one_began(companion: Any) -> None:
    saver, thread = InMemorySaver(), {"configurable": {"thread_id": "t"}}
    note = call("core_memory_append", block="human", content="Has a dog.")
    first, _ = companion([note, say("Good.")], checkpointer=saver)
    first.say("I have a dog.", thread)
    second, backend = companion([say("It barks.")], checkpointer=saver)
    second.say("What does it do?", thread)
    assert "Has a dog." in backend.prompts()[0]
    assert {request.session for request in backend.requests} == {"t"}


def test_constrained_model_gets_the_schema_of_a_call_and_must_reply_at_the_last_step() -> None:
    from langchain_core.messages import AIMessage, HumanMessage
    from langchain_core.runnables import RunnableLambda

    from langchain_cacheslide.agents import fresh_memory

    formats: list[Any] = []

    def answer(prompt: Any, **given: Any) -> AIMessage:
        formats.append(given["response_format"])
        return AIMessage(call("archival_memory_search", query="x"))

    graph = memgpt_graph(RunnableLambda(answer), steps=2)
    graph.invoke({**fresh_memory("I am kind."), "messages": [HumanMessage("Hi.")]})
    names = [
        [one["properties"]["name"]["const"] for one in each["json_schema"]["schema"]["anyOf"]]
        for each in formats
    ]
    assert names == [[tool.name for tool in MEMORY_TOOLS], ["send_message"]]
    assert formats[0] == call_format(MEMORY_TOOLS)


def test_functions_are_listed_without_what_the_agent_fills_in() -> None:
    schemas = {schema["name"]: schema for schema in function_schemas(MEMORY_TOOLS)}
    appended = schemas["core_memory_append"]["parameters"]
    assert appended["properties"] == {
        "block": {"enum": ["human", "persona"], "type": "string"},
        "content": {"type": "string"},
    }
    assert appended["required"] == ["block", "content"]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ('Sure: {"name": "a", "arguments": {"x": 1}} and more', "a"),
        ('{not json} {"name": "b", "arguments": {}}', "b"),
        ('{"name": "c"}', None),
        ('{"name": "d", "arguments": "x"}', None),
        ("{" * 2000, None),
        ('{"name": "e", "arguments": {"page": 9223372036854775807}}', "e"),
        ('{"name": "f", "arguments": {"page": 9223372036854775808}}', None),
        ("", None),
    ],
)
def test_first_call_in_a_text_is_found(text: str, name: str | None) -> None:
    found = parsed_call(text)
    assert (found and found["name"]) == name


def test_search_ranks_by_okapi_bm25() -> None:
    """Worked by hand: three passages of 2, 2 and 4 words; mean 8/3; idf = ln(1 + (3-n+.5)/(n+.5)).

    "boat" is in the first and the third; the shorter passage ranks first. A passage without the
    words is left out, and of equal ones the newer comes first.
    """
    passages = ["red boat", "red mill", "the boat sails far"]
    assert search(passages, "Boat!") == ["red boat", "the boat sails far"]
    assert search(["a b", "a b"], "b") == ["a b", "a b"]
    assert search(["red mill", "red boat"], "red") == ["red boat", "red mill"]
    assert search([], "x") == search(passages, "") == []
