"""The side channel of chunk plans, alone and under ChatCacheSlide."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import TYPE_CHECKING

import pytest
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage

from cacheslide_agents.chunks import Chunk, ChunkedPrompt, Message, Role
from cacheslide_agents.prompt.wire import MOST_TASKS, ChunkPlan, ChunkPlans, shared_task
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


def conversation(task: str, *texts: str) -> ChunkedPrompt:
    """A system message that all of these share, and `texts` of the user."""
    shared = Message("system", (Chunk(f"{task}-rules", "Be brief.", Role.REUSE),))
    own = (Message("user", (Chunk(f"{task}-{n}", text),)) for n, text in enumerate(texts))
    return ChunkedPrompt((shared, *own), task=task)


def plan(answer: AIMessage) -> str:
    return str(answer.response_metadata["cacheslide"]["plan"])


def test_plan_is_found_by_role_and_text_however_the_message_is_cut() -> None:
    plans = ChunkPlans()
    plans.remember(PROMPT, "mine")
    whole = Message("system", (Chunk("x", "Be brief. Look twice."),))
    found = plans.recall(whole, "mine")
    assert found is not None
    assert found.cut(whole.content) == RULES
    assert found.tasks == ("sky",)
    assert plans.recall(Message("user", whole.chunks), "mine") is None
    assert plans.recall(Message("system", (Chunk("x", "Be brief. Look once."),)), "mine") is None


def test_plan_is_unknown_in_every_other_namespace() -> None:
    plans = ChunkPlans()
    plans.remember(PROMPT, "mine")
    plans.remember(conversation("rain", "Sky?"), "theirs")
    (system, user) = PROMPT.messages
    assert plans.recall(system, "theirs") is None
    found = [plans.recall(user, namespace) for namespace in ("mine", "theirs", "default")]
    assert found == [
        ChunkPlan(("sky",), (("text", Role.REUSE, 4),)),
        ChunkPlan(("rain",), (("rain-0", Role.RECOMPUTE, 4),)),
        None,
    ]


def test_message_remembers_the_tasks_that_it_was_seen_in_last() -> None:
    plans = ChunkPlans()
    tasks = [f"task-{number}" for number in range(MOST_TASKS + 2)]
    for task in [*tasks, tasks[3]]:
        plans.remember(conversation(task), "mine")
    found = plans.recall(conversation("x").messages[0], "mine")
    assert found is not None
    assert found.tasks == (tasks[2], *tasks[4:], tasks[3])
    assert found.chunks == ((f"{tasks[3]}-rules", Role.REUSE, 9),)


@pytest.mark.parametrize(
    ("opening", "task"),
    [
        ([], None),
        ([None], None),
        ([("a",)], "a"),
        ([("a",), None], None),
        ([("a", "b"), ("b",)], "b"),
        ([("a", "b"), ("a", "b")], None),
        ([("a",), ("b",)], None),
    ],
    ids=str,
)
def test_task_is_that_in_which_every_message_was_seen(
    opening: list[tuple[str, ...] | None], task: str | None
) -> None:
    plans = [None if tasks is None else ChunkPlan(tasks, ()) for tasks in opening]
    assert shared_task(plans) == task


def test_least_recently_used_plans_make_room() -> None:
    plans = ChunkPlans(capacity=4)

    def message(name: str) -> Message:
        return Message("user", (Chunk(f"{name}1", name), Chunk(f"{name}2", name)))

    for name in ("a", "b"):
        plans.remember(ChunkedPrompt((message(name),)), "mine")
    plans.recall(message("a"), "mine")
    plans.remember(ChunkedPrompt((message("c"),)), "mine")
    kept = [plans.recall(message(name), "mine") is not None for name in "abc"]
    assert kept == [True, False, True]


def test_threads_may_share_a_side_channel() -> None:
    plans = ChunkPlans(capacity=64)

    def use(number: int) -> bool:
        message = Message("user", (Chunk(f"c{number}", f"text {number % 8}"),))
        plans.remember(ChunkedPrompt((message,)), "mine")
        found = plans.recall(message, "mine")
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


def test_another_namespaces_names_and_task_never_reach_a_request(
    chat: ChatCacheSlide, backend: FakeBackend
) -> None:
    """One tenant's prompt has the other's system message, and even its question."""
    turn = [SystemMessage("Be brief."), HumanMessage("Sky?")]

    def asked() -> tuple[str, list[str], str]:
        answer = chat.invoke(turn, namespace="tenant-b")
        return backend.requests[-1].task, ids(backend), plan(answer)

    before = asked()
    chat.invoke(to_prompt_value(conversation("takeover", "Sky?")), namespace="tenant-a")
    chat.to_messages(conversation("takeover", "Sky?"), namespace="tenant-a")
    chat.to_messages(conversation("takeover", "Sky?"))
    assert asked() == before
    assert before[0] == "default"
    assert before[2] == "automatic"


def test_rendered_prompt_is_known_in_the_namespace_it_was_rendered_for(
    chat: ChatCacheSlide,
) -> None:
    messages = chat.to_messages(PROMPT, namespace="tenant-a")
    bare = [flattened(message) for message in messages]
    plans = [plan(chat.invoke(bare, namespace=f"tenant-{name}")) for name in "ab"]
    assert plans == ["recalled", "automatic"]


def test_shared_system_message_does_not_carry_the_task_of_another_conversation(
    chat: ChatCacheSlide, backend: FakeBackend
) -> None:
    def tasks_of(*conversations: list[BaseMessage]) -> list[str]:
        for messages in conversations:
            chat.invoke(messages)
        return [request.task for request in backend.requests[-len(conversations) :]]

    system = SystemMessage("Be brief.")
    plain, sky, rain = ([system, HumanMessage(text)] for text in ("Hello", "Sky?", "Rain?"))
    chat.invoke(to_prompt_value(conversation("sky", "Sky?")))
    assert tasks_of(plain, sky) == ["default", "sky"]
    chat.invoke(to_prompt_value(conversation("rain", "Rain?")))
    later = [*sky, AIMessage("Blue."), HumanMessage("Rain?")]
    assert tasks_of(plain, sky, rain, later) == ["default", "sky", "rain", "sky"]


def test_server_is_told_the_chunks_known_in_the_requests_own_namespace(
    support: Callable[[str], ModuleType],
) -> None:
    with support("openai_server").OpenAIServer(status={"plan_versions": [1]}) as server:
        chat = ChatCacheSlide(base_url=server.url)
        bare = [flattened(message) for message in chat.to_messages(PROMPT, namespace="tenant-a")]
        for namespace in ("tenant-a", "tenant-b"):
            chat.invoke(bare, namespace=namespace)
    mine, theirs = server.plans
    assert (mine.namespace, mine.task) == ("tenant-a", "sky")
    assert [chunk.id for chunk in mine.chunks] == ["rules", "notes", "text"]
    assert (theirs.namespace, theirs.task) == ("tenant-b", "default")
    assert {chunk.id.partition("-")[0] for chunk in theirs.chunks} == {"system", "user"}
