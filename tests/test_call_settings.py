"""Settings of a call that are of the wrong kind or out of range: one clear error each."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
from langchain_core.messages import HumanMessage

from cacheslide_agents.errors import PromptError, RequestError
from cacheslide_agents.sampling import Sampling
from langchain_cacheslide import ChatCacheSlide

if TYPE_CHECKING:
    from tests.support.fake_backend import FakeBackend

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"stop": 5}, "stop=5 must be a string or a list of strings"),
    ({"stop": [5]}, r"stop=\[5\] must be a string or a list"),
    ({"stop": {"a": 1}}, "stop={'a': 1} must be a string or a list"),
    ({"policy": 5}, "policy=5 must be a policy or its name"),
    ({"reuse": "x"}, "reuse='x' must be True or False"),
    ({"namespace": 5}, "namespace=5 must be a string"),
    ({"session": 5}, "session=5 must be a string, or None"),
    ({"task": 5}, "task=5 must be a string, or None"),
    ({"model": 5}, "model=5 "),
    ({"timeout": float("inf")}, "timeout=inf must be a number of seconds above 0 and at most"),
    ({"timeout": 1e300}, r"timeout=1e\+300 must be a number of seconds"),
    ({"timeout": float("nan")}, "timeout=nan must be a number of seconds"),
    ({"timeout": True}, "timeout=True must be a number of seconds"),
    ({"timeout": "5"}, "timeout='5' must be a number of seconds"),
    ({"max_retries": True}, "max_retries=True must be at least 0, and whole"),
    ({"grammar": 5}, "grammar=5 must be a Grammar, or its kind and its source"),
    ({"grammar": ("regex", "b", "c")}, "must be a Grammar, or its kind and its source"),
    ({"grammar": ("regex", 5)}, "must be a Grammar, or its kind and its source"),
    ({"tools": 5}, "tools=5 must be a list of tools"),
    ({"tools": "abc"}, "tools='abc' must be a list of tools"),
    ({"tool_choice": ["a"]}, r"tool_choice=\['a'\] must be 'auto'"),
    ({"parallel_tool_calls": "x"}, "parallel_tool_calls='x' must be True or False"),
    ({"strict": "no"}, "strict='no' must be True or False"),
    ({"logprobs": 3}, "logprobs=3 must be True or False; say how many by top_logprobs"),
    ({"logprobs": 0}, "logprobs=0 must be True or False; say how many by top_logprobs"),
    ({"n": 10**6}, "n=1000000 must be from 1 to 1024"),
    ({"num_beams": 10**9}, "num_beams=1000000000 must be from 1 to 256"),
    ({"repetition_penalty": 1e-300}, "repetition_penalty=1e-300 must be from 0.01 to 100"),
    ({"repetition_penalty": 1e39}, "must be from 0.01 to 100"),
    ({"temperature": True}, "temperature=True must be finite"),
    ({"temperature": 10**400}, "must be finite and at least 0"),
    ({"top_p": True}, "top_p=True must be above 0"),
    ({"seed": True}, "seed=True must be whole"),
    ({"n": True}, "n=True must be from 1"),
]


@pytest.fixture
def backend(support: Callable[[str], ModuleType]) -> FakeBackend:
    fake: FakeBackend = support("fake_backend").FakeBackend()
    return fake


@pytest.fixture(params=["local", "served"])
def chat(request: pytest.FixtureRequest, backend: FakeBackend) -> ChatCacheSlide:
    """The server is never reached: nobody listens there."""
    if request.param == "local":
        return ChatCacheSlide(backend=backend)
    return ChatCacheSlide(base_url="http://127.0.0.1:9/v1", model="tiny", max_retries=0)


@pytest.mark.parametrize(("given", "message"), WRONG)
def test_wrong_setting_of_a_call_is_named_before_anything_is_asked(
    chat: ChatCacheSlide, backend: FakeBackend, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        chat.invoke("Go", **given)
    assert backend.requests == []


@pytest.mark.parametrize("given", [{"policy": 5}, {"timeout": float("inf")}, {"n": 10**6}])
def test_wrong_setting_of_a_model_is_refused_when_it_is_made(
    backend: FakeBackend, given: dict[str, Any]
) -> None:
    with pytest.raises(RequestError, match=next(iter(given))):
        ChatCacheSlide(backend=backend, **given)


def test_wrong_tools_are_refused_when_they_are_bound(chat: ChatCacheSlide) -> None:
    with pytest.raises(RequestError, match="tools=5 must be a list of tools"):
        chat.bind_tools(5)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="tools=5 must be a list of tools"):
        chat.with_structured_output({"type": "object"}, tools=5)  # type: ignore[arg-type]


@pytest.mark.parametrize("content", [None, {"a": 1}, 5])
def test_content_that_was_changed_to_what_it_cannot_be_is_named(
    chat: ChatCacheSlide, content: Any
) -> None:
    message = HumanMessage("x")
    message.__dict__["content"] = content
    with pytest.raises(PromptError, match="content of a message of type 'human' must be text"):
        chat._call([message], None, {}).generate()


def test_values_at_the_edge_are_taken(backend: FakeBackend) -> None:
    chat = ChatCacheSlide(backend=backend)
    given: dict[str, Any] = {
        "timeout": 604_800,
        "stop": ("a", "b"),
        "repetition_penalty": 0.01,
        "n": 3,
    }
    assert len(chat.generate([[HumanMessage("Go")]], **given).generations[0]) == 3
    assert backend.requests[-1].sampling.stop == ("a", "b")
    assert Sampling(n=1024).n == 1024
    assert Sampling(num_beams=256, n=256, repetition_penalty=100).num_beams == 256
