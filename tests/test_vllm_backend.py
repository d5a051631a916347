"""The vLLM backend as its callers see it: streams, sampling, grammars, scores, many callers."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
import torch

from cacheslide_agents.backend import Backend, GenerationRequest, Grammar, Sampling
from cacheslide_agents.chunks import Role, Span
from cacheslide_agents.errors import ContextOverflowError, RequestError
from cacheslide_agents.policies import CacheSlide, Epic, PromptCache, Recompute

REUSE = CacheSlide(may_decline=False)

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),  # vLLM's and its packages' own
]


@pytest.fixture(scope="module")
def backend(lab: ModuleType) -> Any:
    return lab.engine("inside")


@pytest.fixture
def namespace() -> str:
    return uuid4().hex


def plain_prompt(backend: Any) -> list[int]:
    """Text: vLLM's detokenizer looks back into the prompt for whole characters."""
    ids: list[int] = backend.tokenizer.encode("Which of the two rivers is longer? Answer: the")
    return ids


def text_of(backend: Any, request: GenerationRequest) -> str:
    return "".join(chunk.text for chunk in backend.generate(request))


def test_it_is_a_backend(backend: Any) -> None:
    assert isinstance(backend, Backend)
    assert backend.max_model_len == 2048


def test_an_answer_is_streamed_and_ends_with_a_receipt(
    backend: Any, lab: ModuleType, namespace: str
) -> None:
    first, _ = lab.turns(20, 100)
    request = lab.request(first, REUSE, namespace=namespace)
    *body, last = backend.generate(request)
    assert len(body) == lab.TOKENS - 1
    assert all(chunk.finish_reason is None and chunk.receipt is None for chunk in body)
    assert last.finish_reason == "length"
    assert last.receipt.request_id == request.request_id
    assert 0 < last.receipt.plan_s < last.receipt.ttft_s


def test_chunks_of_the_prompt_are_told_in_the_receipt(
    backend: Any, lab: ModuleType, namespace: str
) -> None:
    first, second = lab.turns(21, 500)

    def spans(ids: list[int], update: int) -> tuple[Span, ...]:
        cuts = (0, 100, 100 + update, len(ids))
        names = ("head", "update", "tail")
        return tuple(
            Span(name, Role.REUSE, start, stop, f"{name}{stop - start}")
            for name, start, stop in zip(names, cuts[:-1], cuts[1:], strict=True)
        )

    common: dict[str, Any] = {"namespace": namespace, "policy": REUSE}
    one = Sampling(max_tokens=1)
    list(backend.generate(GenerationRequest(first, spans(first, 20), sampling=one, **common)))
    (last,) = backend.generate(GenerationRequest(second, spans(second, 37), sampling=one, **common))
    head, update, tail = last.receipt.chunks
    assert (head.outcome, head.shift, head.reused) == ("hit", 0, 100)
    assert (update.outcome, update.reused) == ("update", 0)
    assert (tail.outcome, tail.shift) == ("hit", 17)
    assert tail.reused + tail.corrected == len(second) - 137 - 1


def test_several_answers_share_one_prefill_and_one_stored_context(
    backend: Any, lab: ModuleType, namespace: str
) -> None:
    first, second = lab.turns(22, 600)
    lab.ask(backend, lab.request(first, REUSE, namespace=namespace, retain=True))
    request = lab.request(
        second, REUSE, namespace=namespace, retain=True, n=3, temperature=0.8, seed=1, logprobs=None
    )
    texts: dict[int, list[int]] = {}
    receipts = []
    for chunk in backend.generate(request):
        texts.setdefault(chunk.index, []).extend(chunk.token_ids)
        receipts += [chunk.receipt] * (chunk.receipt is not None)
    assert sorted(texts) == [0, 1, 2]
    assert all(len(tokens) == lab.TOKENS for tokens in texts.values())
    assert len({receipt.to_dict()["active_tokens"] for receipt in receipts}) == 1
    lab.settle(backend)
    stored = lab.working(backend).store.find(lab.key_of(backend, namespace))
    assert len(stored) == 2


def test_log_probabilities_are_those_of_the_chosen_and_most_likely_tokens(
    backend: Any, lab: ModuleType, namespace: str
) -> None:
    first, _ = lab.turns(23, 80)
    request = lab.request(first, Recompute(), namespace=namespace, logprobs=3)
    told = [each for chunk in backend.generate(request) for each in chunk.logprobs]
    tokens = [each.token_id for each in told]
    scores = backend.score(lab.request(first, Recompute(), namespace=namespace), tokens)
    assert scores.logprobs.shape == (lab.TOKENS, lab.VOCABULARY)
    assert np.allclose(np.exp(scores.logprobs).sum(axis=1), 1.0, atol=1e-4)
    for row, each in zip(scores.logprobs, told, strict=True):
        assert each.logprob == pytest.approx(row[each.token_id], abs=1e-4)
        best = np.sort(row)[::-1][:3]
        assert [value for _, value in each.top] == pytest.approx(best.tolist(), abs=1e-4)


def test_a_continuation_is_scored_whatever_the_model_would_say(
    backend: Any, lab: ModuleType, namespace: str
) -> None:
    """Against prompts that end one token later each: the distribution before every token."""
    first, _ = lab.turns(24, 60)
    forced = [7, 300, 12]
    scores = backend.score(lab.request(first, Recompute(), namespace=namespace), forced)
    for count in range(3):
        prompt = first + forced[:count]
        one = backend.score(lab.request(prompt, Recompute(), namespace=namespace), [forced[count]])
        assert np.allclose(one.logprobs[0], scores.logprobs[count], atol=1e-3)


def test_a_stop_string_ends_the_answer_and_is_left_out(
    backend: Any, lab: ModuleType, namespace: str
) -> None:
    first = plain_prompt(backend)
    whole = text_of(backend, lab.request(first, Recompute(), namespace=namespace))
    stop = whole[4:6]
    request = lab.request(first, Recompute(), namespace=namespace, stop=(stop,))
    *_, last = chunks = list(backend.generate(request))
    assert "".join(chunk.text for chunk in chunks) == whole[: whole.index(stop)]
    assert last.finish_reason == "stop"


def test_a_seed_makes_sampling_repeatable(backend: Any, lab: ModuleType, namespace: str) -> None:
    first, _ = lab.turns(26, 60)
    options = {"temperature": 1.0, "min_p": 0.01, "repetition_penalty": 1.1, "seed": 3}
    once, again, other = (
        lab.ask(
            backend,
            lab.request(first, Recompute(), namespace=namespace, **{**options, "seed": seed}),
        ).tokens
        for seed in (3, 3, 4)
    )
    assert once == again != other


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        (Grammar("regex", "(yes|no) [0-9]{2}"), r"(yes|no) [0-9]{2}"),
        (Grammar("ebnf", 'root ::= "left" | "right"'), "left|right"),
    ],
)
def test_an_answer_keeps_to_its_grammar(
    backend: Any, lab: ModuleType, namespace: str, grammar: Grammar, pattern: str
) -> None:
    first = plain_prompt(backend)
    request = GenerationRequest(
        first,
        namespace=namespace,
        policy=REUSE,
        sampling=Sampling(max_tokens=40),
        grammar=grammar,
    )
    assert re.fullmatch(pattern, text_of(backend, request))


def test_callers_of_an_event_loop_are_answered_together(
    backend: Any, lab: ModuleType, namespace: str
) -> None:
    prompts = [lab.turns(30 + each, 80)[0] for each in range(4)]
    expected = [
        lab.ask(backend, lab.request(ids, Recompute(), namespace=namespace)).tokens
        for ids in prompts
    ]

    async def tokens(ids: list[int]) -> tuple[int, ...]:
        request = lab.request(ids, Recompute(), namespace=namespace)
        return tuple(
            [token async for chunk in backend.agenerate(request) for token in chunk.token_ids]
        )

    async def all_of_them() -> list[tuple[int, ...]]:
        return list(await asyncio.gather(*map(tokens, prompts)))

    assert asyncio.run(all_of_them()) == expected


def test_a_caller_that_leaves_leaves_nothing_behind(
    backend: Any, lab: ModuleType, namespace: str
) -> None:
    first, second = lab.turns(40, 400)
    lab.ask(backend, lab.request(first, REUSE, namespace=namespace, retain=True))
    stream = backend.generate(
        lab.request(second, REUSE, namespace=namespace, retain=True, max_tokens=500)
    )
    next(stream)
    stream.close()
    lab.settle(backend)
    assert not lab.scheduling(backend)._planned
    assert not backend._thread.call(lambda engine: engine.has_unfinished_requests())
    dense = lab.ask(backend, lab.request(first, Recompute(), namespace=namespace))
    assert len(dense.tokens) == lab.TOKENS


def test_warming_stores_a_context_and_pins_hold_it(
    backend: Any, lab: ModuleType, namespace: str
) -> None:
    first, second = lab.turns(41, 300)
    backend.warm(lab.request(first, REUSE, namespace=namespace))
    assert lab.ask(backend, lab.request(second, REUSE, namespace=namespace)).receipt.reused_tokens
    backend.pin("someone")
    backend.release("someone")
    assert backend.metrics()["contexts"] >= 1


def test_chunks_warmed_alone_are_reused_by_policies_that_want_them(
    backend: Any, lab: ModuleType, namespace: str
) -> None:
    ids, _ = lab.turns(42, 400)
    spans = (Span("a", Role.REUSE, 0, 200, "a"), Span("b", Role.REUSE, 200, 420, "b"))
    policy = Epic(tokens=16)
    request = GenerationRequest(
        ids, spans, namespace, policy=policy, sampling=Sampling(max_tokens=1)
    )
    backend.warm(request)
    (last,) = backend.generate(request)
    assert last.receipt.outcome == "hit"
    assert last.receipt.reused_tokens == 420 - 16 - 1


def test_positions_with_gaps_are_answered_densely_and_named(
    backend: Any, lab: ModuleType, namespace: str
) -> None:
    ids, _ = lab.turns(43, 200)
    spans = (
        Span("a", Role.RECOMPUTE, 0, 20, "a"),
        Span("b", Role.REUSE, 20, 220, "b"),
    )
    policy = PromptCache(slots={"a": 64})
    request = GenerationRequest(
        ids, spans, namespace, policy=policy, sampling=Sampling(max_tokens=1)
    )
    backend.warm(request)
    (last,) = backend.generate(request)
    assert last.receipt.outcome == "fallback"
    assert "gaps" in last.receipt.reason


def test_prompt_log_probabilities_switch_reuse_off_and_the_receipt_says_so(
    backend: Any, lab: ModuleType, namespace: str
) -> None:
    from vllm import SamplingParams

    first, second = lab.turns(44, 300)
    lab.ask(backend, lab.request(first, REUSE, namespace=namespace, retain=True))
    request = lab.request(second, REUSE, namespace=namespace)
    params = SamplingParams(
        max_tokens=1, prompt_logprobs=0, extra_args=backend._extra(request, REUSE)
    )
    list(backend._thread.stream(request.request_id, second, params))
    receipt = backend._receipt(request, REUSE, 0.0)
    assert (receipt.outcome, receipt.reason) == ("declined", "prompt_logprobs")
    assert receipt.active_tokens == len(second)


def test_masked_attention_agrees_with_the_engines_kernels(
    backend: Any,
    lab: ModuleType,
    namespace: str,
    monkeypatch: pytest.MonkeyPatch,
    support: Callable[[str], ModuleType],
) -> None:
    from vllm_cacheslide import masked

    first, second = lab.turns(45, 700)
    lab.ask(backend, lab.request(first, REUSE, namespace=namespace, retain=True))
    runs = lab.ask(backend, lab.request(second, REUSE, namespace=namespace))
    layers = lab.working(backend)._prefill.layers
    paged, stand_in = layers.paged, support("kernel_stand_in").StandIn()

    def reused(way: Any) -> Any:
        made = masked.Masked(layers.attention, layers.decoder.attentions, way)
        with monkeypatch.context() as patch:
            patch.setattr(layers, "attention", made)
            return lab.ask(backend, lab.request(second, REUSE, namespace=namespace))

    assert reused(masked.SdpaAttention(paged)).equals(runs)
    monkeypatch.setattr(masked, "fused_attention", stand_in)
    assert reused(masked.FusedAttention(paged)).equals(
        runs
    )  # a CPU's pages are the engine's to read
    assert stand_in.calls == []
    monkeypatch.setattr(paged, "pages", lambda layer: unpacked(paged, layer))
    monkeypatch.setattr(masked, "trusted_on_pages", lambda *_: True)
    assert reused(masked.FusedAttention(paged)).equals(runs)
    active = runs.receipt.active_tokens - 1  # the last token is vLLM's
    assert stand_in.calls == [(active, False, True)] * backend.layers


def unpacked(paged: Any, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """All pages of a layer as a GPU has them."""
    size, cache = paged.kernel_block_size, paged._attentions[layer].kv_cache
    keys, values = paged.read(layer, torch.arange(len(cache) * size))
    keys, values = (each.unflatten(0, (-1, size)).transpose(1, 2) for each in (keys, values))
    return keys, values


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"prompt_ids": []}, RequestError, "at least one token"),
        ({"prompt_ids": [1, -2]}, RequestError, "outside the vocabulary"),
        ({"prompt_ids": [1] * 2048}, ContextOverflowError, "2048"),
        ({"sampling": Sampling(num_beams=2)}, RequestError, "num_beams=2"),
        ({"spans": (Span("a", Role.REUSE, 0, 2, "a"),)}, RequestError, "spans end at"),
        ({"policy": "cacheslide"}, RequestError, "is not one"),
    ],
)
def test_bad_input_is_refused_before_any_work(
    backend: Any, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    request = GenerationRequest(**{"prompt_ids": [1, 2, 3], **changes})
    with pytest.raises(error, match=message):
        backend.generate(request)


def test_what_vllm_itself_refuses_is_a_request_error(backend: Any) -> None:
    request = GenerationRequest([1, 2, 3], grammar=Grammar("regex", "(unclosed"))
    with pytest.raises(RequestError, match="vLLM refuses"):
        list(backend.generate(request))
