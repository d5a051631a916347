"""The side channel of chunk plans, alone and under ChatCacheSlide."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import TYPE_CHECKING

import pytest
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage

from cacheslide_agents.chunks import Chunk, ChunkedPrompt, Message, Role
from cacheslide_agents.prompt.wire import ChunkPlans
from langchain_cacheslide import BackendLoader, ChatCacheSlide, to_prompt_value

if TYPE_CHECKING:
    from tests.support.fake_backend import FakeBackend

RULES = (Chunk("rules", "Be brief. ", Role.REUSE), Chunk("notes", "Look twice."))
PROMPT = ChunkedPrompt(
    (Message("system", RULES), Message("user", (Chunk("text", "Sky?", Role.REUSE),))), task="sky"
)


@pytest.fixture
def backend(support: Callable[[str], ModuleType]) -> FakeBackend:
    fake: FakeBackend = support("fake_backend").FakeBackend()
    return fake


@pytest.fixture
def chat(backend: FakeBackend) -> ChatCacheSlide:
    return ChatCacheSlide(backend=backend)


def flattened(message: BaseMessage) -> BaseMessage:
    """What middleware leaves of a message that it rebuilds from its text."""
    return message.model_copy(update={"content": message.text})


def ids(backend: FakeBackend) -> list[str]:
    return [span.id for span in backend.requests[-1].spans]


def plan(answer: AIMessage) -> str:
    return str(answer.response_metadata["cacheslide"]["plan"])


def test_plan_is_found_by_role_and_text_however_the_message_is_cut() -> None:
    plans = ChunkPlans()
    plans.remember(PROMPT)
    whole = Message("system", (Chunk("x", "Be brief. Look twice."),))
    found = plans.recall(whole)
    assert found is not None
    assert found.cut(whole.content) == RULES
    assert found.task == "sky"
    assert plans.recall(Message("user", whole.chunks)) is None
    assert plans.recall(Message("system", (Chunk("x", "Be brief. Look once."),))) is None


def test_least_recently_used_plans_make_room() -> None:
    plans = ChunkPlans(capacity=4)

    def message(name: str) -> Message:
        return Message("user", (Chunk(f"{name}1", name), Chunk(f"{name}2", name)))

    for name in ("a", "b"):
        plans.remember(ChunkedPrompt((message(name),)))
    plans.recall(message("a"))
    plans.remember(ChunkedPrompt((message("c"),)))
    assert [plans.recall(message(name)) is not None for name in "abc"] == [True, False, True]


def test_threads_may_share_a_side_channel() -> None:
    plans = ChunkPlans(capacity=64)

    def use(number: int) -> bool:
        message = Message("user", (Chunk(f"c{number}", f"text {number % 8}"),))
        plans.remember(ChunkedPrompt((message,)))
        found = plans.recall(message)
        return found is not None and found.cut(message.content)[0].text == message.content

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(use, range(400)))


def test_middleware_that_drops_block_metadata_does_not_break_the_chunks(
    chat: ChatCacheSlide, backend: FakeBackend
) -> None:
    messages = chat.to_messages(PROMPT)
    assert plan(chat.invoke(messages)) == "given"
    bare = [SystemMessage(messages[0].text), HumanMessage(messages[1].text)]
    for rebuilt in ([flattened(m) for m in messages], bare):
        assert plan(chat.invoke(rebuilt)) == "recalled"
        assert ids(backend) == ["rules", "notes", "text", "generation-prompt"]
        assert backend.requests[-1].task == "sky"
        assert backend.requests[-1].prompt_ids == backend.requests[0].prompt_ids


def test_annotated_messages_seen_once_are_known_again_without_annotations(
    chat: ChatCacheSlide, backend: FakeBackend
) -> None:
    first = chat.invoke(to_prompt_value(PROMPT))
    history = [SystemMessage("Be brief. Look twice."), HumanMessage("Sky?"), first]
    assert plan(chat.invoke([*history, HumanMessage("And now?")])) == "recalled"
    assert ids(backend)[:3] == ["rules", "notes", "text"]


def test_message_that_changed_goes_without_a_plan_and_the_receipt_says_so(
    chat: ChatCacheSlide, backend: FakeBackend
) -> None:
    system, user = chat.to_messages(PROMPT)
    changed = system.model_copy(update={"content": f"{system.text} It is Monday."})
    answer = chat.invoke([changed, flattened(user)])
    assert plan(answer) == "mismatch: message 0 changed after it was rendered"
    assert "It is Monday." in backend.prompt(backend.requests[-1])
    assert ids(backend)[0].startswith("system-")
    assert ids(backend)[1] == "text"


def test_plain_messages_are_cut_automatically(chat: ChatCacheSlide) -> None:
    assert plan(chat.invoke("Hi")) == "automatic"


def test_side_channel_belongs_to_the_loader(backend: FakeBackend) -> None:
    mine, theirs = BackendLoader(), BackendLoader()
    ChatCacheSlide(backend=backend, loader=mine).to_messages(PROMPT)
    text = [SystemMessage("Be brief. Look twice."), HumanMessage("Sky?")]
    answers = [
        ChatCacheSlide(backend=backend, loader=loader).invoke(text) for loader in (mine, theirs)
    ]
    assert [plan(answer) for answer in answers] == ["recalled", "automatic"]


def test_rendered_prompt_twice_in_one_conversation_keeps_every_id_once(
    chat: ChatCacheSlide, backend: FakeBackend
) -> None:
    chat.to_messages(PROMPT)
    turn = [SystemMessage("Be brief. Look twice."), HumanMessage("Sky?")]
    chat.invoke([*turn, AIMessage("Blue."), HumanMessage("Sky?")])
    assert len(set(ids(backend))) == len(ids(backend))
