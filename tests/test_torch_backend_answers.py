"""What answers hold beyond their text: grammars, log-probabilities and several at once."""

from __future__ import annotations

import asyncio
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from jsonschema import Draft202012Validator
from transformers import AutoModelForCausalLM

from cacheslide_agents.backend import GenerationChunk, GenerationRequest, Grammar, Sampling
from cacheslide_agents.errors import RequestError
from cacheslide_agents.policies import CacheSlide, Recompute
from torch_cacheslide import TorchBackend
from torch_cacheslide.load import Decoupling

WINDOW = 512
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["cat", "dog"]},
    },
    "required": ["name", "kind"],
    "additionalProperties": False,
}
EAGER = CacheSlide(may_decline=False)
OBJECT = Grammar("json_schema", json.dumps(SCHEMA))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, support: Any) -> Path:
    tiny = support("tiny_models")
    path: Path = tiny.write_model(
        tmp_path_factory.mktemp("tiny-answers"),
        num_hidden_layers=3,
        max_position_embeddings=WINDOW,
        initializer_range=0.3,
        eos_token_id=258,
    )
    return path


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder).train(False)


@pytest.fixture(scope="module")
def tiny(folder: Path) -> Iterator[TorchBackend]:
    backend = TorchBackend(str(folder), device="cpu", store_bytes=1 << 26)
    yield backend
    backend.close()


def ids_of(seed: int, count: int) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(0, 250, count).tolist()
    return ids


def asking(ids: list[int], grammar: Grammar | None = None, **sampling: Any) -> GenerationRequest:
    return GenerationRequest(
        ids, sampling=Sampling(**sampling), grammar=grammar, policy=Recompute(), retain=False
    )


def ask(backend: TorchBackend, request: GenerationRequest) -> dict[int, list[GenerationChunk]]:
    """The chunks of every answer."""
    answers: dict[int, list[GenerationChunk]] = defaultdict(list)
    for chunk in backend.generate(request):
        answers[chunk.index].append(chunk)
    return answers


def text_of(chunks: list[GenerationChunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


def tokens_of(chunks: list[GenerationChunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


def test_finished_answers_validate_whatever_the_seed(tiny: TorchBackend) -> None:
    finished = 0
    for seed in range(16):
        request = asking(ids_of(seed, 30), OBJECT, max_tokens=120, temperature=1.5, seed=seed)
        (chunks,) = ask(tiny, request).values()
        if chunks[-1].finish_reason == "stop":
            finished += 1
            Draft202012Validator(SCHEMA).validate(json.loads(text_of(chunks)))
    assert finished >= 10


def test_a_grammar_ends_the_answer_even_where_the_end_token_is_ignored(tiny: TorchBackend) -> None:
    request = asking(ids_of(1, 30), Grammar("regex", "[ab]{3}"), max_tokens=50, ignore_eos=True)
    (chunks,) = ask(tiny, request).values()
    assert re.fullmatch("[ab]{3}", text_of(chunks)) and chunks[-1].finish_reason == "stop"
    assert tokens_of(chunks)[-1] == 258


def test_running_out_of_tokens_inside_a_grammar_is_a_length_finish(tiny: TorchBackend) -> None:
    (chunks,) = ask(tiny, asking(ids_of(1, 30), OBJECT, max_tokens=5)).values()
    assert text_of(chunks).startswith("{") and chunks[-1].finish_reason == "length"


def test_a_stop_string_ends_an_answer_inside_its_grammar(tiny: TorchBackend) -> None:
    request = asking(ids_of(1, 30), OBJECT, max_tokens=60, stop=(":",))
    (chunks,) = ask(tiny, request).values()
    assert re.fullmatch(r'\{\s?"name"\s?', text_of(chunks)) and chunks[-1].finish_reason == "stop"


def test_a_structural_tag_lets_the_answer_end_in_text_or_in_a_call(tiny: TorchBackend) -> None:
    tag = {
        "type": "tag",
        "begin": "<tool_call>",
        "content": {"type": "json_schema", "json_schema": SCHEMA},
        "end": "</tool_call>",
    }
    kind = {"type": "triggered_tags", "triggers": ["<tool_call>"], "tags": [tag]}
    forced = {**kind, "at_least_one": True, "stop_after_first": True}
    free, call = (
        Grammar("structural_tag", json.dumps({"type": "structural_tag", "format": each}))
        for each in (kind, forced)
    )
    plain = ask(tiny, asking(ids_of(2, 30), max_tokens=20, ignore_eos=True))[0]
    allowed = ask(tiny, asking(ids_of(2, 30), free, max_tokens=20))[0]
    assert text_of(allowed) == text_of(plain)  # without a trigger, text is free
    chunks = ask(tiny, asking(ids_of(4, 30), call, max_tokens=150, temperature=1.0, seed=1))[0]
    found = re.fullmatch("<tool_call>(.*)</tool_call>", text_of(chunks), re.DOTALL)
    assert found is not None and chunks[-1].finish_reason == "stop"
    Draft202012Validator(SCHEMA).validate(json.loads(found[1]))


def test_a_grammar_that_cannot_be_used_is_refused_before_any_work(tiny: TorchBackend) -> None:
    before = tiny.metrics().get("requests", 0)
    with pytest.raises(RequestError, match="parenthesis"):
        tiny.generate(asking(ids_of(1, 30), Grammar("regex", "(a")))

    async def consume() -> None:
        async for _ in tiny.agenerate(asking(ids_of(1, 30), Grammar("regex", "(a"))):
            pass

    with pytest.raises(RequestError, match="parenthesis"):
        asyncio.run(consume())
    assert tiny.metrics().get("requests", 0) == before


@pytest.mark.parametrize("grammar", [None, OBJECT], ids=["free", "grammar"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_logprobs_are_those_of_transformers_before_any_filter(
    tiny: TorchBackend, reference: Any, grammar: Grammar | None, temperature: float
) -> None:
    ids = ids_of(5, 40)
    request = asking(
        ids,
        grammar,
        max_tokens=12,
        temperature=temperature,
        top_k=3,
        repetition_penalty=1.3,
        logprobs=4,
        seed=0,
    )
    (chunks,) = ask(tiny, request).values()
    told = [entry for chunk in chunks for entry in chunk.logprobs or ()]
    tokens = tokens_of(chunks)
    assert [entry.token_id for entry in told] == tokens
    with torch.inference_mode():
        logits = reference(torch.tensor([ids + tokens])).logits[0, len(ids) - 1 : -1]
    expected = logits.log_softmax(-1)
    likely = expected.topk(4)
    for row, entry in enumerate(told):
        assert entry.logprob == pytest.approx(float(expected[row, entry.token_id]), abs=1e-4)
        assert [token for token, _ in entry.top] == likely.indices[row].tolist()
        assert [value for _, value in entry.top] == pytest.approx(
            likely.values[row].tolist(), abs=1e-4
        )


def test_logprobs_are_those_that_score_gives(tiny: TorchBackend) -> None:
    request = asking(ids_of(6, 40), max_tokens=8, logprobs=0)
    (chunks,) = ask(tiny, request).values()
    scores = tiny.score(request, tokens_of(chunks)).logprobs
    for row, chunk in enumerate(chunks):
        assert chunk.logprobs is not None
        (entry,) = chunk.logprobs
        assert entry.top == ()
        assert entry.logprob == pytest.approx(float(scores[row, entry.token_id]), abs=1e-5)


def test_nothing_is_told_where_nothing_was_asked(tiny: TorchBackend) -> None:
    (chunks,) = ask(tiny, asking(ids_of(6, 40), max_tokens=3)).values()
    assert {chunk.logprobs for chunk in chunks} == {None}


def test_greedy_decoding_with_a_penalty_is_that_of_transformers(
    tiny: TorchBackend, reference: Any
) -> None:
    for seed in range(4):
        ids = ids_of(seed, 25)
        sampling: dict[str, Any] = {"max_tokens": 20, "repetition_penalty": 1.4}
        (chunks,) = ask(tiny, asking(ids, **sampling)).values()
        expected = reference.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids)),
            max_new_tokens=20,
            do_sample=False,
            repetition_penalty=1.4,
            pad_token_id=258,
        )
        assert tokens_of(chunks) == expected[0, len(ids) :].tolist()


def test_several_answers_are_those_of_requests_of_their_own(tiny: TorchBackend) -> None:
    ids = ids_of(7, 40)
    sampling: dict[str, Any] = {"max_tokens": 16, "temperature": 1.2, "top_p": 0.95, "logprobs": 1}
    together = ask(tiny, asking(ids, n=4, seed=10, **sampling))
    assert sorted(together) == [0, 1, 2, 3]
    assert len({tuple(tokens_of(chunks)) for chunks in together.values()}) > 1
    for index, chunks in together.items():
        (alone,) = ask(tiny, asking(ids, seed=10 + index, **sampling)).values()
        assert tokens_of(chunks) == tokens_of(alone)
        assert text_of(chunks) == text_of(alone)
        assert chunks[-1].finish_reason == alone[-1].finish_reason
        assert chunks[-1].receipt is not None
        assert [c.logprobs[0].logprob for c in chunks if c.logprobs] == pytest.approx(
            [c.logprobs[0].logprob for c in alone if c.logprobs], abs=1e-4
        )


def test_answers_of_one_request_come_interleaved(tiny: TorchBackend) -> None:
    request = asking(ids_of(7, 40), n=3, max_tokens=4, ignore_eos=True)
    assert [chunk.index for chunk in tiny.generate(request)] == [0, 1, 2] * 4


def test_several_answers_follow_one_grammar_each_in_its_own_place(tiny: TorchBackend) -> None:
    request = asking(ids_of(8, 30), OBJECT, n=4, max_tokens=150, temperature=1.5, seed=3)
    answers = ask(tiny, request)
    ended = [chunks for chunks in answers.values() if chunks[-1].finish_reason == "stop"]
    assert len(ended) >= 3 and len({text_of(chunks) for chunks in ended}) >= 3
    for chunks in ended:
        Draft202012Validator(SCHEMA).validate(json.loads(text_of(chunks)))


def test_an_answer_that_ends_early_leaves_the_others_as_they_were(tiny: TorchBackend) -> None:
    ids = ids_of(9, 40)
    sampling: dict[str, Any] = {
        "n": 3,
        "max_tokens": 12,
        "temperature": 1.0,
        "seed": 1,
        "ignore_eos": True,
    }
    whole = ask(tiny, asking(ids, **sampling))
    stop = tokens_of(whole[1])[3]
    cut = ask(tiny, asking(ids, stop_token_ids=(stop,), **sampling))
    for index, chunks in whole.items():
        tokens = tokens_of(chunks)
        end = tokens.index(stop) + 1 if stop in tokens else len(tokens)
        assert tokens_of(cut[index]) == tokens[:end]


def test_cancelling_stops_all_answers(tiny: TorchBackend) -> None:
    request = replace(
        asking(ids_of(1, 20), n=3, max_tokens=100, ignore_eos=True),
        policy=CacheSlide(),
        retain=True,
        session="gone",
    )
    stream = tiny.generate(request)
    next(stream)
    stream.close()
    ask(tiny, asking(ids_of(2, 20), max_tokens=2))
    found = tiny.store.find(tiny._runtime.planning.key(request))
    (context,) = [context for context in found if context.session == "gone"]
    assert len(context) < 20 + 100


def test_the_first_answer_is_what_the_next_turn_finds(tiny: TorchBackend) -> None:
    """Its keys and values are moved behind the prompt; reusing them must equal a dense run."""
    ids = ids_of(11, 40)
    first = replace(
        asking(ids, n=3, max_tokens=20, temperature=1.0, seed=5, ignore_eos=True),
        retain=True,
        policy=EAGER,
    )
    answer = tokens_of(ask(tiny, first)[0])
    turn = replace(first, prompt_ids=ids + answer[:-1] + ids_of(12, 20), retain=False)
    scores = tiny.score(turn, ids_of(13, 6))
    assert scores.receipt.reused_tokens == len(ids) + len(answer) - 1
    dense = tiny.score(replace(turn, policy=Recompute()), ids_of(13, 6))
    np.testing.assert_allclose(scores.logprobs, dense.logprobs, atol=1e-4)


@pytest.mark.parametrize("decoupling", [Decoupling.OFF, Decoupling.SLOTS])
def test_several_answers_on_reused_context_equal_one_after_another(
    folder: Path, decoupling: str
) -> None:
    backend = TorchBackend(str(folder), device="cpu", decoupling=decoupling)
    ids = ids_of(14, 120)
    common: dict[str, Any] = {"policy": EAGER, "retain": False}
    moved = [*ids_of(15, 9), *ids[4:]]
    sampling = Sampling(max_tokens=10, temperature=1.0, seed=2, n=3, ignore_eos=True)
    backend.warm(GenerationRequest(ids, policy=EAGER))
    together = ask(backend, GenerationRequest(moved, sampling=sampling, **common))
    receipt = together[0][-1].receipt
    assert receipt is not None and receipt.reused_tokens > 0
    for index, chunks in together.items():
        alone = GenerationRequest(moved, sampling=replace(sampling, n=1, seed=2 + index), **common)
        (expected,) = ask(backend, alone).values()
        assert tokens_of(chunks) == tokens_of(expected)
    backend.close()


def test_peak_memory_counts_the_prompt_once_and_a_tail_per_answer(folder: Path) -> None:
    backend = TorchBackend(str(folder), device="cpu")
    one, three = (
        ask(backend, asking(ids_of(1, 250), n=n, max_tokens=200, ignore_eos=True))[0][-1].receipt
        for n in (1, 3)
    )
    assert one is not None and three is not None
    per_row = 2 * 3 * 2 * 8 * 4  # keys and values, layers, KV heads, head size, float32
    captured = 250 * per_row // 2
    assert one.peak_kv_bytes == 512 * per_row + captured
    assert three.peak_kv_bytes == 1024 * per_row + captured  # 250 + 3 * 200 rows, by 256
    assert backend._runtime._arena.nbytes == 1024 * per_row
    backend.close()
