"""ChatCacheSlide: what reaches the backend, what comes back, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage

from cacheslide_agents.backend import Sampling
from cacheslide_agents.chunks import Role
from cacheslide_agents.errors import RequestError, TemplateError
from cacheslide_agents.policies import CacheSlide, Prefix
from cacheslide_agents.prompt.template import PromptTemplate
from langchain_cacheslide import (
    ChatCacheSlide,
    TemplateRunnable,
    to_prompt_value,
)

if TYPE_CHECKING:
    from tests.support.fake_backend import FakeBackend

TEMPLATE = PromptTemplate.from_string(
    '{% message "system" %}{% reuse "rules" %}Be brief.{% endreuse %}{% endmessage %}'
    '{% message "user" %}{% recompute "notes" %}{{ notes }} {% endrecompute %}'
    '{% reuse "text" %}{{ text }}{% endreuse %}{% endmessage %}',
    task="notes",
)
VALUES = {"notes": "Look twice.", "text": "The sky is blue."}


@pytest.fixture
def backend(support: Callable[[str], ModuleType]) -> FakeBackend:
    fake: FakeBackend = support("fake_backend").FakeBackend(reused=7)
    return fake


@pytest.fixture
def chat(backend: FakeBackend) -> ChatCacheSlide:
    return ChatCacheSlide(backend=backend)


def test_answer_carries_text_finish_reason_model_and_the_receipt_as_plain_values(
    chat: ChatCacheSlide, backend: FakeBackend
) -> None:
    answer = chat.invoke("Say these words")
    assert isinstance(answer, AIMessage)
    assert answer.content == "Say these words"
    assert answer.response_metadata["finish_reason"] == "stop"
    assert answer.response_metadata["model_name"] == "fake-model"
    assert answer.response_metadata["model_provider"] == "cacheslide"
    receipt = answer.response_metadata["cacheslide"]
    assert receipt["request_id"] == backend.requests[0].request_id
    assert receipt["outcome"] == "partial"
    assert [type(chunk["role"]) for chunk in receipt["chunks"]] == [str, str]


def test_usage_counts_the_tokens_of_prompt_answer_and_cache(
    chat: ChatCacheSlide, backend: FakeBackend
) -> None:
    usage = chat.invoke("Say these words").usage_metadata
    prompt = len(backend.requests[0].prompt_ids)
    output = len(b"Say these words")
    assert usage == {
        "input_tokens": prompt,
        "output_tokens": output,
        "total_tokens": prompt + output,
        "input_token_details": {"cache_read": 7, "cache_creation": prompt - 7},
    }


def test_plain_messages_become_the_tokens_of_the_models_own_chat_template(
    chat: ChatCacheSlide, backend: FakeBackend
) -> None:
    chat.invoke([SystemMessage("Be brief."), HumanMessage("Hi"), AIMessage("Yes?"), ("user", "Go")])
    dialogue = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": "Go"},
    ]
    expected = backend.tokenizer.apply_chat_template(
        dialogue, add_generation_prompt=True, return_dict=False
    )
    assert list(backend.requests[0].prompt_ids) == expected
    assert len(backend.requests[0].spans) == 5
    assert backend.requests[0].task == "default"


@pytest.mark.parametrize(
    "ask",
    [
        pytest.param(lambda chat: (TEMPLATE | chat).invoke(VALUES), id="template piped"),
        pytest.param(
            lambda chat: (TemplateRunnable(template=TEMPLATE) | chat.bind(seed=1)).invoke(VALUES),
            id="runnable piped into a bound model",
        ),
        pytest.param(lambda chat: chat.invoke(TEMPLATE.render(**VALUES)), id="chunked prompt"),
        pytest.param(lambda chat: next(chat.stream(TEMPLATE.render(**VALUES))), id="stream"),
        pytest.param(lambda chat: chat.batch([TEMPLATE.render(**VALUES)]), id="batch"),
    ],
)
def test_template_reaches_the_backend_with_its_chunks_roles_and_task(
    chat: ChatCacheSlide, backend: FakeBackend, ask: Callable[[ChatCacheSlide], Any]
) -> None:
    ask(chat)
    (request,) = backend.requests
    assert [(span.id, span.role) for span in request.spans] == [
        ("rules", Role.REUSE),
        ("notes", Role.RECOMPUTE),
        ("text", Role.REUSE),
        ("generation-prompt", Role.RECOMPUTE),
    ]
    assert request.task == "notes"
    assert "Look twice. The sky is blue." in backend.prompt(request)


def test_task_of_the_model_overrides_the_templates(backend: FakeBackend) -> None:
    chat = ChatCacheSlide(backend=backend, task="mine")
    chat.invoke(to_prompt_value(TEMPLATE.render(**VALUES)))
    assert backend.requests[0].task == "mine"


def test_missing_template_value_is_one_template_error(chat: ChatCacheSlide) -> None:
    with pytest.raises(TemplateError, match="'notes' is undefined"):
        (TEMPLATE | chat).invoke({"text": "x"})


def test_packaged_template_is_found_by_name(chat: ChatCacheSlide, backend: FakeBackend) -> None:
    values = {"examples": [], "reflections": [], "paragraphs": [], "question": "Who?"}
    (TemplateRunnable.named("reflexion") | chat).invoke(values)
    assert backend.requests[0].task == "reflexion"


def test_settings_of_the_model_reach_the_backend(backend: FakeBackend) -> None:
    chat = ChatCacheSlide(
        backend=backend,
        temperature=0.5,
        max_tokens=9,
        top_p=0.9,
        top_k=3,
        min_p=0.05,
        repetition_penalty=1.1,
        seed=4,
        stop=["END"],
        num_beams=2,
        length_penalty=0.5,
        logprobs=True,
        top_logprobs=3,
        namespace="tenant",
        session="run-1",
    )
    chat.invoke("Hi")
    (request,) = backend.requests
    assert request.sampling == Sampling(
        max_tokens=9,
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        min_p=0.05,
        repetition_penalty=1.1,
        seed=4,
        stop=("END",),
        num_beams=2,
        length_penalty=0.5,
        logprobs=3,
    )
    assert (request.namespace, request.session) == ("tenant", "run-1")


def test_settings_of_a_call_win_over_bound_ones_and_those_over_the_models(
    backend: FakeBackend,
) -> None:
    chat = ChatCacheSlide(backend=backend, max_tokens=9, seed=1, namespace="a")
    bound = chat.bind(seed=2, namespace="b")
    bound.invoke("Hi", seed=3, stop=["END"])
    (request,) = backend.requests
    assert request.sampling == Sampling(max_tokens=9, seed=3, stop=("END",))
    assert request.namespace == "b"


@pytest.mark.parametrize(
    "ask",
    [
        lambda backend: ChatCacheSlide(backend=backend, reuse=False).invoke("Hi"),
        lambda backend: ChatCacheSlide(backend=backend, policy="prefix", reuse=False).invoke("Hi"),
        lambda backend: ChatCacheSlide(backend=backend).bind(reuse=False).invoke("Hi"),
        lambda backend: ChatCacheSlide(backend=backend).invoke("Hi", reuse=False),
    ],
)
def test_without_reuse_the_backend_is_told_to_recompute(
    backend: FakeBackend, ask: Callable[[FakeBackend], AIMessage]
) -> None:
    usage = ask(backend).usage_metadata
    assert backend.requests[0].policy is not None
    assert backend.requests[0].policy.name == "recompute"
    assert usage is not None
    assert usage["input_token_details"] == {"cache_read": 0, "cache_creation": 0}


def test_policy_may_be_a_name_an_instance_or_left_to_the_backend(backend: FakeBackend) -> None:
    mine = CacheSlide(min_run=32)
    for given in ("prefix", mine, None):
        ChatCacheSlide(backend=backend, policy=given).invoke("Hi")
    assert [request.policy for request in backend.requests] == [Prefix(), mine, None]


def test_unknown_policy_name_is_refused_before_the_backend_is_asked(backend: FakeBackend) -> None:
    with pytest.raises(RequestError, match="no policy is named 'fastest'"):
        ChatCacheSlide(backend=backend, policy="fastest").invoke("Hi")
    assert backend.requests == []


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda chat: chat.bind(tool_choice="any").invoke("Hi"), "no tool is bound"),
        (lambda chat: chat.invoke("Hi", model="other"), "'other' does not name the model"),
        (lambda chat: chat.invoke("Hi", presence_penalty=1.0), "'presence_penalty': no such"),
        (lambda chat: chat.invoke("Hi", temperature=-1.0), "temperature=-1.0 must be finite"),
    ],
)
def test_what_is_not_supported_is_refused_by_name_and_never_ignored(
    chat: ChatCacheSlide, backend: FakeBackend, ask: Callable[[ChatCacheSlide], Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        ask(chat)
    assert backend.requests == []


def test_arguments_that_are_absent_or_langchains_own_are_accepted(
    chat: ChatCacheSlide, backend: FakeBackend
) -> None:
    chat.invoke("Hi", tools=None, stream=False)
    assert len(backend.requests) == 1


def test_none_leaves_a_setting_as_the_model_has_it(backend: FakeBackend) -> None:
    chat = ChatCacheSlide(backend=backend, max_tokens=7, temperature=0.5, namespace="own")
    nothing = ("max_tokens", "temperature", "top_p", "top_k", "n", "reuse", "namespace", "stop")
    chat.invoke("Hi", **dict.fromkeys(nothing))
    chat.invoke("Hi")
    given, plain = backend.requests
    assert (given.sampling, given.policy, given.namespace, given.retain) == (
        plain.sampling,
        plain.policy,
        "own",
        True,
    )
    assert (given.sampling.max_tokens, given.sampling.temperature) == (7, 0.5)


def test_none_says_that_there_is_to_be_no_seed(backend: FakeBackend) -> None:
    ChatCacheSlide(backend=backend, seed=3).invoke("Hi", seed=None)
    assert backend.requests[0].sampling.seed is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"top_p": 0.0}, "top_p=0.0 must be above 0"),
        ({"max_tokens": 0}, "max_tokens=0 must be at least 1"),
        ({"backend": 3}, "backend=3 must be a backend's name or a Backend"),
    ],
)
def test_settings_out_of_range_are_refused_when_the_model_is_made(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        ChatCacheSlide(**settings)


def test_model_that_is_not_the_given_backends_is_refused(backend: FakeBackend) -> None:
    assert ChatCacheSlide(backend=backend, model="fake-model").load() is backend
    with pytest.raises(RequestError, match=r"'other' does not name the model.*'fake-model'"):
        ChatCacheSlide(backend=backend, model="other")


def test_tokens_are_counted_by_the_models_own_tokenizer(
    chat: ChatCacheSlide, backend: FakeBackend
) -> None:
    assert chat.get_num_tokens("naïve") == len("naïve".encode())
    messages = [SystemMessage("Be brief."), HumanMessage("Hi")]
    counted = chat.get_num_tokens_from_messages(messages)
    chat.invoke(messages)
    assert counted == len(backend.requests[0].prompt_ids)


def test_langchains_own_cache_keeps_namespaces_and_policies_apart(backend: FakeBackend) -> None:
    cache = InMemoryCache()
    for settings in ({}, {}, {"namespace": "other"}, {"reuse": False}, {"seed": 1}):
        ChatCacheSlide(backend=backend, cache=cache, **settings).invoke("Hi")
    assert len(backend.requests) == 4


def test_tracing_names_provider_and_model(backend: FakeBackend) -> None:
    params = ChatCacheSlide(backend=backend, max_tokens=5)._get_ls_params()
    assert (params["ls_provider"], params["ls_model_name"]) == ("cacheslide", "fake-model")
    assert params["ls_max_tokens"] == 5
