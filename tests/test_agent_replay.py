"""Recorded answers in place of a model's own, and the log of calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import ModuleType
from typing import Any
from uuid import uuid4

import pytest
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage
from langchain_core.outputs import ChatGeneration, LLMResult

from cacheslide_agents.errors import DataError
from langchain_cacheslide import ChatCacheSlide
from langchain_cacheslide.agents import CallLog, Replayed
from langchain_cacheslide.agents.printing import call_line
from langchain_cacheslide.hints import chat_model_in


@pytest.fixture
def model(support: Callable[[str], ModuleType]) -> ChatCacheSlide:
    support("fake_backend")
    return ChatCacheSlide(backend=support("hinting_backend").HintingBackend(["own"], reused=7))


def test_model_is_asked_but_the_recording_answers(model: Any) -> None:
    replayed = Replayed(model, (answer for answer in ("first", None)))
    answers = [replayed.invoke("Hi."), replayed.invoke("Hi.")]
    assert [answer.text for answer in answers] == ["first", "own"]
    assert len(model.backend.requests) == 2
    assert answers[0].response_metadata["cacheslide"]["reused_tokens"] == 7


def test_async_and_bound_calls_are_replayed_too(model: Any) -> None:
    replayed = Replayed(model, ["first"]).bind(session="s", max_tokens=3)
    assert asyncio.run(replayed.ainvoke("Hi.")).text == "first"
    (request,) = model.backend.requests
    assert (request.session, request.sampling.max_tokens) == ("s", 3)


def test_recording_that_is_too_short_is_a_data_error(model: Any) -> None:
    replayed = Replayed(model, ["only"])
    replayed.invoke("Hi.")
    with pytest.raises(DataError, match="ends after 1 answers"):
        replayed.invoke("Hi.")


def test_chat_model_is_found_below_bindings_and_replays(model: Any) -> None:
    wrapped = Replayed(model.bind(stop=["x"]), []).bind(session="s").with_config(tags=["t"])
    assert chat_model_in(wrapped) is model
    assert chat_model_in(GenericFakeChatModel(messages=iter([]))) is None
    assert chat_model_in(None) is None


def test_log_has_each_call_with_its_receipt_and_tells_of_it(model: Any) -> None:
    told: list[str] = []
    log = CallLog(lambda call: told.append(call.text))
    replayed = Replayed(model, ["first"])
    replayed.invoke("Hi.", {"callbacks": [log], "metadata": {"cacheslide_step": "think"}})
    (call,) = log.calls
    assert (call.step, call.text, told) == ("think", "own", ["own"])
    assert call.receipt["reused_tokens"] == 7
    assert log.seconds == call.seconds > 0


def test_printed_line_has_what_the_agent_heard(model: Any) -> None:
    lines: list[str] = []
    log = CallLog(lambda call: lines.append(call_line(call)))
    replayed = Replayed(model, ["ls", None])
    for _ in range(2):
        replayed.invoke("Hi.", {"callbacks": [log]})
    assert [call.recorded for call in log.calls] == ["ls", None]
    said = [line.splitlines()[1].strip() for line in lines]
    assert said == ["[dim](recorded)[/] ls", "own"]
    assert "7 of" in lines[0] and "(cold)" not in lines[0]


def test_failed_call_uses_no_recorded_answer_up(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    replayed = Replayed(model, ["first"])
    with monkeypatch.context() as patch:
        patch.setattr(model.backend, "generate", lambda request: iter([1 / 0]))
        with pytest.raises(ZeroDivisionError):
            replayed.invoke("Hi.")
    assert replayed.invoke("Hi.").text == "first"


def test_log_takes_any_model_and_leaves_failed_calls_out() -> None:
    def answers() -> Any:
        yield AIMessage("fine")
        raise ConnectionError

    log, other = CallLog(), GenericFakeChatModel(messages=answers())
    other.invoke("Hi.", {"callbacks": [log]})
    with pytest.raises(ConnectionError):
        other.invoke("Hi.", {"callbacks": [log]})
    assert [(call.step, call.text, call.receipt) for call in log.calls] == [("model", "fine", {})]


def test_log_leaves_out_a_call_that_had_begun_before_it_was_there(model: Any) -> None:
    told: list[str] = []
    log = CallLog(lambda call: told.append(call.text))
    log.on_llm_end(
        LLMResult(generations=[[ChatGeneration(message=AIMessage("late"))]]), run_id=uuid4()
    )
    model.invoke("Hi.", {"callbacks": [log]})
    assert [call.text for call in log.calls] == told == ["own"]
