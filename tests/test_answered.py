"""A whole answer, gathered from its pieces, and the request that asks for it."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from cacheslide_agents import answered as module
from cacheslide_agents.answered import Pieces, answered
from cacheslide_agents.backend import GenerationChunk, GenerationRequest, Receipt, Sampling
from cacheslide_agents.chunks import EncodedPrompt, Role, Span
from cacheslide_agents.errors import BackendError
from cacheslide_agents.policies import Recompute

SAYS = "Yes, of course."
RECEIPT = Receipt(
    request_id="r",
    policy="recompute",
    outcome="cold",
    reason="",
    prompt_tokens=2,
    reused_tokens=0,
    active_tokens=2,
    compute_fraction=1.0,
    exact=True,
)


@pytest.fixture
def backend(support: Callable[[str], ModuleType]) -> Any:
    return support("fake_backend").FakeBackend(says=(SAYS,))


@pytest.fixture
def request_(backend: Any) -> GenerationRequest:
    return GenerationRequest(backend.tokenizer.encode("Go"))


def test_request_of_a_prompt_has_its_tokens_its_chunks_and_its_task() -> None:
    span = Span("all", Role.REUSE, 0, 2, "d")
    prompt = EncodedPrompt((5, 6), (span,), "ab", "memgpt")
    sampling, policy = Sampling(max_tokens=3), Recompute()
    asked = GenerationRequest.of(
        prompt, namespace="n", session="s", sampling=sampling, policy=policy, retain=False
    )
    assert asked == GenerationRequest(
        (5, 6), (span,), "n", "memgpt", "s", sampling, None, policy, False, asked.request_id
    )
    plain = GenerationRequest.of(prompt)
    assert plain == GenerationRequest((5, 6), (span,), task="memgpt", request_id=plain.request_id)


def test_whole_answer_has_text_tokens_and_the_receipt(
    backend: Any, request_: GenerationRequest
) -> None:
    pieces: list[str] = []
    answer = answered(backend, request_, write=pieces.append)
    assert answer.text == "".join(pieces) == SAYS
    assert len([piece for piece in pieces if piece]) > 1
    assert backend.tokenizer.decode(list(answer.token_ids)) == SAYS
    assert (answer.finish_reason, answer.receipt.request_id) == ("stop", request_.request_id)
    assert len(answer.times_s) == len(answer.token_ids)
    assert (backend.finished, backend.stopped) == (1, 0)


def test_clock_may_have_been_started_before(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([12.0, 12.5])
    monkeypatch.setattr(module, "perf_counter", lambda: next(now))
    pieces = Pieces(started=10.0)
    pieces.add(GenerationChunk(0, "a", (1,)))
    pieces.add(GenerationChunk(0, "bc", (2, 3), finish_reason="stop", receipt=RECEIPT))
    answer = pieces.whole("tiny")
    assert (answer.ttft_s, answer.times_s) == (2.0, (2.0, 2.5, 2.5))


def test_interrupted_caller_stops_the_backend(backend: Any, request_: GenerationRequest) -> None:
    def interrupt(text: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        answered(backend, request_, write=interrupt)
    assert (backend.finished, backend.stopped) == (0, 1)


@pytest.mark.parametrize(
    "chunks",
    [
        (),
        (GenerationChunk(0, "a", (1,)),),
        (GenerationChunk(0, "a", (1,), finish_reason="stop"),),
        (GenerationChunk(0, "", (), finish_reason="stop", receipt=RECEIPT),),
    ],
    ids=["nothing", "no end", "no receipt", "no token"],
)
def test_answer_without_an_end_is_an_error(chunks: tuple[GenerationChunk, ...]) -> None:
    pieces = Pieces()
    for chunk in chunks:
        pieces.add(chunk)
    with pytest.raises(BackendError, match="tiny: an answer ended without token or receipt"):
        pieces.whole("tiny")
