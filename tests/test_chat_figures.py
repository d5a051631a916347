"""The script that measures what the chat model adds: that both sides do the same work."""

from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from cacheslide_agents.backend import GenerationChunk, GenerationRequest
from langchain_cacheslide import ChatCacheSlide

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return __import__("chat_figures")


def test_the_chat_model_sends_the_ids_that_transformers_gives(
    script: Any, smollm2_tokenizer: Any
) -> None:
    sent: list[tuple[int, ...]] = []

    class Noting(script.AnswersAtOnce):  # type: ignore[misc]
        def generate(self, request: GenerationRequest) -> Generator[GenerationChunk, None, None]:
            sent.append(tuple(request.prompt_ids))
            yield from super().generate(request)

    dialogue = script.dialogue_of(smollm2_tokenizer, 600, 8)
    model = ChatCacheSlide(backend=Noting(smollm2_tokenizer))
    for number in range(2):
        assert model.invoke(dialogue.call(number)).content == "Yes."
        assert sent[-1] == tuple(script.token_ids(smollm2_tokenizer, dialogue.call(number)))
    before, after = (dialogue.call(number) for number in range(2))
    assert [a == b for a, b in zip(before, after, strict=True)] == [True] * 2 + [False] + [True] * 5


def test_figures_are_printed_for_a_prompt_of_the_length_asked_for(
    script: Any, tiny_model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--model", tiny_model, "--tokens", "500", "--messages", "4", "--repeats", "2"]
    script.main([*arguments, "--json"])
    figures = json.loads(capsys.readouterr().out)
    assert 500 <= figures["tokens"] < 580
    assert sum(name.startswith("ms: ") for name in figures) == 3
    script.main(arguments)
    assert len(capsys.readouterr().out.splitlines()) == 4


@pytest.mark.parametrize("messages", [2, 5])
def test_a_dialogue_alternates_and_has_a_third_message(
    script: Any, smollm2_tokenizer: Any, messages: int
) -> None:
    with pytest.raises(SystemExit, match="even number from 4"):
        script.dialogue_of(smollm2_tokenizer, 100, messages)
