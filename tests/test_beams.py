"""Beam search: the same answers as transformers, on shared rows, under grammars and stops."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
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

END = 258


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, support: Any) -> Path:
    """Small weights: distributions so flat that beams part and meet, and answers end."""
    tiny = support("tiny_models")
    path: Path = tiny.write_model(
        tmp_path_factory.mktemp("tiny-beams"),
        num_hidden_layers=3,
        max_position_embeddings=256,
        initializer_range=0.25,
        eos_token_id=END,
    )
    tiny.edit_weights(path, favour_the_end)
    return path


def favour_the_end(tensors: dict[str, torch.Tensor]) -> None:
    """A row of the head that scores well often: answers of all lengths end."""
    head = tensors["lm_head.weight"]
    head[END] = head[:END].abs().mean(0) * head[7].sign() * 2.0


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


def ask(
    backend: TorchBackend,
    ids: list[int],
    grammar: Grammar | None = None,
    policy: Any = None,
    **sampling: Any,
) -> dict[int, list[GenerationChunk]]:
    request = GenerationRequest(
        ids,
        sampling=Sampling(**sampling),
        grammar=grammar,
        policy=policy or Recompute(),
        retain=policy is not None,
    )
    answers: dict[int, list[GenerationChunk]] = defaultdict(list)
    for chunk in backend.generate(request):
        answers[chunk.index].append(chunk)
    return answers


def tokens_of(chunks: list[GenerationChunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


def text_of(chunks: list[GenerationChunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


def searched(reference: Any, ids: list[int], **options: Any) -> Any:
    return reference.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids)),
        do_sample=False,
        early_stopping=False,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )


@pytest.mark.parametrize("length_penalty", [1.0, 0.0, 2.0, -1.0])
@pytest.mark.parametrize("beams", [2, 4])
def test_the_answers_are_those_of_transformers(
    tiny: TorchBackend, reference: Any, beams: int, length_penalty: float
) -> None:
    lengths = set()
    for seed in range(6):
        ids = ids_of(seed, 20)
        options: dict[str, Any] = {"num_beams": beams, "length_penalty": length_penalty}
        ours = ask(tiny, ids, max_tokens=14, n=beams, **options)
        theirs = searched(
            reference, ids, max_new_tokens=14, num_return_sequences=beams, **options
        ).sequences
        for index, row in enumerate(theirs[:, len(ids) :].tolist()):
            expected = row[: row.index(END) + 1] if END in row else row
            assert tokens_of(ours[index]) == expected, (seed, index)
            ended = ours[index][-1].finish_reason
            assert ended == ("stop" if expected[-1] == END else "length")
            lengths.add(len(expected))
    assert len(lengths) > 1 or length_penalty == 2.0  # which makes the longest the best


def test_a_repetition_penalty_works_on_log_probabilities_as_in_transformers(
    tiny: TorchBackend, reference: Any
) -> None:
    ids = ids_of(3, 20)
    options: dict[str, Any] = {"num_beams": 3, "repetition_penalty": 1.5}
    ours = ask(tiny, ids, max_tokens=12, **options)
    theirs = searched(reference, ids, max_new_tokens=12, **options).sequences[0, len(ids) :]
    assert tokens_of(ours[0]) == [token for token in theirs.tolist() if token != 0]


def test_answers_come_best_first_with_the_log_probabilities_of_their_tokens(
    tiny: TorchBackend, reference: Any
) -> None:
    ids = ids_of(1, 20)
    ours = ask(tiny, ids, max_tokens=10, num_beams=3, n=3, logprobs=2)
    theirs = searched(reference, ids, max_new_tokens=10, num_beams=3, num_return_sequences=3)
    for index, chunks in ours.items():
        told = [entry for chunk in chunks for entry in chunk.logprobs or ()]
        tokens = tokens_of(chunks)
        with torch.inference_mode():
            logits = reference(torch.tensor([ids + tokens])).logits[0, len(ids) - 1 : -1]
        expected = logits.log_softmax(-1)[torch.arange(len(tokens)), tokens]
        assert [entry.logprob for entry in told] == pytest.approx(expected.tolist(), abs=1e-4)
        mean = sum(entry.logprob for entry in told) / len(told)
        assert mean == pytest.approx(float(theirs.sequences_scores[index]), abs=1e-4)


def test_only_the_best_answers_are_given_and_only_when_the_search_is_over(
    tiny: TorchBackend,
) -> None:
    ids = ids_of(2, 20)
    every = ask(tiny, ids, max_tokens=8, num_beams=4, n=4)
    best = ask(tiny, ids, max_tokens=8, num_beams=4, n=2)
    assert sorted(best) == [0, 1]
    assert [tokens_of(best[i]) for i in best] == [tokens_of(every[i]) for i in best]
    request = GenerationRequest(ids, sampling=Sampling(max_tokens=8, num_beams=4, n=2))
    indices = [chunk.index for chunk in tiny.generate(request)]
    assert indices == sorted(indices)


def test_beams_stay_inside_a_grammar(tiny: TorchBackend) -> None:
    schema = {
        "type": "object",
        "properties": {
            "kind": {"enum": ["cat", "dog", "cow"]},
            "age": {"type": "integer", "minimum": 0, "maximum": 99},
        },
        "required": ["kind"],
    }
    grammar = Grammar("json_schema", json.dumps(schema))
    answers = ask(tiny, ids_of(4, 20), grammar, max_tokens=60, num_beams=3, n=3)
    ended = [chunks for chunks in answers.values() if chunks[-1].finish_reason == "stop"]
    assert len(ended) >= 2
    for chunks in ended:
        Draft202012Validator(schema).validate(json.loads(text_of(chunks)))


def test_a_grammar_that_matches_few_texts_gives_few_answers(tiny: TorchBackend) -> None:
    answers = ask(tiny, ids_of(4, 20), Grammar("regex", "yes|no"), max_tokens=9, num_beams=4, n=4)
    assert sorted(text_of(chunks) for chunks in answers.values()) == ["no", "yes"]


def test_a_stop_string_ends_a_beam(tiny: TorchBackend) -> None:
    grammar = Grammar("regex", "(cat|dog), (cow|hen)")
    answers = ask(
        tiny, ids_of(4, 20), grammar, max_tokens=20, num_beams=3, n=3, stop=(", c", ", h")
    )
    assert {text_of(chunks) for chunks in answers.values()} <= {"cat", "dog"}
    assert {chunks[-1].finish_reason for chunks in answers.values()} == {"stop"}
    assert all(re.fullmatch("cat|dog", text_of(chunks)) for chunks in answers.values())


def test_the_best_answer_is_what_the_next_turn_finds(tiny: TorchBackend) -> None:
    ids, eager = ids_of(11, 40), CacheSlide(may_decline=False)
    answer = tokens_of(ask(tiny, ids, policy=eager, max_tokens=12, num_beams=3, ignore_eos=True)[0])
    assert len(answer) == 12
    turn = GenerationRequest(ids + answer[:-1] + ids_of(12, 20), policy=eager, retain=False)
    scores = tiny.score(turn, ids_of(13, 4))
    assert scores.receipt.reused_tokens == len(ids) + len(answer) - 1
    dense = GenerationRequest(turn.prompt_ids, policy=Recompute(), retain=False)
    expected = tiny.score(dense, ids_of(13, 4)).logprobs
    np.testing.assert_allclose(scores.logprobs, expected, atol=1e-4)


def test_cancelling_ends_the_search(tiny: TorchBackend) -> None:
    sampling = Sampling(max_tokens=200, num_beams=4, ignore_eos=True)
    request = GenerationRequest(ids_of(5, 20), sampling=sampling, policy=Recompute())
    decoding = tiny._writer.decoding(request, tiny._writer.start(request), 200)
    asked = []

    def cancelled() -> bool:
        asked.append(True)
        return len(asked) == 3

    with tiny._work.prefilled(request, 200 * decoding.width) as prompted:
        growth = tiny._runtime.growth(prompted, decoding.width)
        steps = list(decoding.steps(prompted.prefilled.logits[-1], growth, cancelled))
    assert len(steps) == 3 and steps[-1].finish_reason == "cancelled"


def test_more_answers_than_beams_are_refused() -> None:
    with pytest.raises(RequestError, match="num_beams"):
        Sampling(n=3, num_beams=2)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_length_penalty_without_bounds_ranks_as_a_large_one(
    tiny: TorchBackend, sign: int
) -> None:
    """At 200 a token more or less outweighs every score, and the power is still a number."""

    def answers(penalty: float) -> dict[int, list[int]]:
        sampling = Sampling(max_tokens=6, num_beams=4, n=4, length_penalty=penalty)
        request = GenerationRequest(ids_of(3, 20), sampling=sampling, policy=Recompute())
        found: dict[int, list[int]] = defaultdict(list)
        for chunk in tiny.generate(request):
            found[chunk.index] += chunk.token_ids
        return found

    expected = answers(200.0 * sign)
    assert len(expected) == 4
    assert answers(1e300 * sign) == expected
