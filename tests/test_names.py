"""Names that no encoding can carry are refused where a request, or a plan of one, is made."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cacheslide_agents.backend import GenerationRequest
from cacheslide_agents.chunks import Chunk, ChunkedPrompt, Message, Role, Span, not_unicode
from cacheslide_agents.errors import RequestError
from cacheslide_agents.prompt.wire_plan import WirePlan, plan_of, read_plan

BROKEN = "ab\ud800"
WHY = r"is not Unicode text: lone surrogate '\\ud800' at character 2; replace it"
PROMPT = ChunkedPrompt((Message("user", (Chunk("ask", "What moves?"),)),))


def test_what_is_wrong_with_a_text_is_told_with_its_place() -> None:
    assert not_unicode("größer 🙂 \0") == ""
    told = not_unicode("a\udfffb\ud800")
    assert told == "is not Unicode text: lone surrogate '\\udfff' at character 1; replace it"


@pytest.mark.parametrize("name", ["namespace", "task", "session", "request_id"])
def test_a_request_takes_no_name_that_cannot_be_sent(name: str) -> None:
    given: dict[str, Any] = {name: BROKEN}
    with pytest.raises(RequestError, match=f"^{name} {WHY}$"):
        GenerationRequest([1, 2], **given)
    given = {name: "größer 🙂"}
    assert getattr(GenerationRequest([1, 2], **given), name) == "größer 🙂"


@pytest.mark.parametrize("name", ["namespace", "task", "request_id"])
def test_a_request_needs_names_that_are_strings(name: str) -> None:
    given: dict[str, Any] = {name: None}
    with pytest.raises(RequestError, match=f"^{name}=None must be a string$"):
        GenerationRequest([1, 2], **given)


def test_a_request_takes_no_chunk_whose_id_cannot_be_sent() -> None:
    spans = (Span("a", Role.REUSE, 0, 1, ""), Span(BROKEN, Role.REUSE, 1, 2, ""))
    with pytest.raises(RequestError, match=f"^the id of span 1 {WHY}$"):
        GenerationRequest([1, 2], spans)
    assert GenerationRequest([1, 2], spans[:1]).spans == spans[:1]


@pytest.mark.parametrize("name", ["namespace", "task", "session", "policy"])
def test_a_plan_with_a_name_that_cannot_be_sent_is_refused(name: str) -> None:
    plan = plan_of(PROMPT).to_dict()
    with pytest.raises(RequestError, match=f"plan cannot be used: its {name} {WHY}"):
        read_plan({**plan, name: BROKEN})
    assert isinstance(read_plan({**plan, name: "größer 🙂"}), WirePlan)


def test_a_plan_with_a_chunk_id_that_cannot_be_sent_is_refused_on_both_ways() -> None:
    plan = plan_of(PROMPT).to_dict()
    with pytest.raises(RequestError, match=f"its chunk id {WHY}"):
        read_plan({**plan, "chunks": [[BROKEN, "reuse", 11]]})
    message = replace(PROMPT.messages[0], chunks=(Chunk(BROKEN, "What moves?"),))
    with pytest.raises(RequestError, match=f"its chunk id {WHY}"):
        plan_of(ChunkedPrompt((message,)))
