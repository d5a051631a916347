"""Sampling: the distribution is transformers', the draws follow it, and seeds repeat them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from cacheslide_agents.backend import Sampling
from cacheslide_agents.errors import ModelError
from torch_cacheslide.processors import RepetitionPenalty
from torch_cacheslide.sampling import NUCLEUS_GUESS, Sampler

VOCABULARY = 50


def random_logits(seed: int, size: int = VOCABULARY) -> Tensor:
    return 3.0 * torch.randn(size, generator=torch.Generator().manual_seed(seed))


def reference(logits: Tensor, sampling: Sampling) -> Tensor:
    """The probabilities of transformers' own chain of processors."""
    chain: Any = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    if sampling.top_k:
        chain.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        chain.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        chain.append(MinPLogitsWarper(sampling.min_p))
    scores: Tensor = chain(torch.zeros(1, 1, dtype=torch.long), logits[None])[0]
    return scores.softmax(-1)


@settings(max_examples=200)
@given(
    seed=st.integers(0, 1 << 32),
    temperature=st.floats(0.05, 5.0),
    top_k=st.integers(0, VOCABULARY + 5),
    top_p=st.floats(1e-6, 1.0),
    min_p=st.one_of(st.just(0.0), st.floats(1e-3, 1.0)),
)
def test_the_distribution_is_that_of_transformers_processors(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    logits = random_logits(seed)
    ours = Sampler(sampling).probabilities(logits)
    torch.testing.assert_close(ours, reference(logits, sampling), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("spread", [0.01, 1.0, 10.0])
def test_a_nucleus_of_any_width_is_that_of_transformers(spread: float) -> None:
    logits = spread * random_logits(8, size=4 * NUCLEUS_GUESS)
    sampling = Sampling(temperature=1.0, top_p=0.8)
    expected = reference(logits, sampling)
    assert (int(expected.count_nonzero()) > NUCLEUS_GUESS) == (spread < 0.1)
    ours = Sampler(sampling).probabilities(logits)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"),
    [(0, 1.0, {0, 1, 2, 3}), (2, 1.0, {2, 3}), (0, 0.75, {2, 3}), (3, 0.65, {2, 3}), (0, 0.4, {3})],
)
def test_filters_keep_the_tokens_that_hand_calculation_keeps(
    top_k: int, top_p: float, kept: set[int]
) -> None:
    # 3, 0.65: among the three best, 0.5 / 0.9 = 0.56 is short of 0.65; the nucleus takes a second
    logits = torch.tensor([0.1, 0.1, 0.3, 0.5]).log()
    sampling = Sampling(temperature=1.0, top_k=top_k, top_p=top_p)
    probabilities = Sampler(sampling).probabilities(logits)
    assert set(probabilities.nonzero().flatten().tolist()) == kept
    assert probabilities.sum().item() == pytest.approx(1.0)


def test_a_minimum_probability_is_relative_to_the_best() -> None:
    logits = torch.tensor([0.05, 0.15, 0.3, 0.5]).log()
    probabilities = Sampler(Sampling(temperature=1.0, min_p=0.4)).probabilities(logits)
    torch.testing.assert_close(probabilities, torch.tensor([0.0, 0.0, 0.375, 0.625]))


@settings(max_examples=100)
@given(
    seed=st.integers(0, 1 << 32),
    penalty=st.floats(0.2, 5.0),
    prompt=st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=40),
    answer=st.lists(st.integers(0, VOCABULARY - 1), max_size=10),
)
def test_a_repetition_penalty_is_that_of_transformers(
    seed: int, penalty: float, prompt: list[int], answer: list[int]
) -> None:
    logits = random_logits(seed)
    ours = RepetitionPenalty(penalty, prompt)
    for token in answer:
        ours.accept(token)
    twin = ours.fork()
    twin.accept((prompt[0] + 1) % VOCABULARY)
    theirs: Any = RepetitionPenaltyLogitsProcessor(penalty)
    expected = theirs(torch.tensor([prompt + answer]), logits[None].clone())[0]
    torch.testing.assert_close(ours.apply(logits), expected)
    assert torch.equal(logits, random_logits(seed))


def test_tokens_that_tie_with_the_kth_are_all_kept() -> None:
    sampler = Sampler(Sampling(temperature=1.0, top_k=2))
    expected = torch.tensor([0.0, 1 / 3, 1 / 3, 1 / 3])
    torch.testing.assert_close(sampler.probabilities(torch.tensor([0.0, 2, 2, 2])), expected)


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_draws_have_the_frequencies_of_the_distribution(top_p: float) -> None:
    draws = 2000
    sampling = Sampling(temperature=1.5, top_k=12, top_p=top_p, seed=7)
    sampler, logits = Sampler(sampling), random_logits(1)
    counts = Counter(sampler.next_token(logits) for _ in range(draws))
    expected = reference(logits, sampling) * draws
    likely = [token for token in range(VOCABULARY) if expected[token] > 5]
    assert set(counts) <= set(expected.nonzero().flatten().tolist())
    assert len(likely) >= 5
    chi_square = sum((counts[t] - float(expected[t])) ** 2 / float(expected[t]) for t in likely)
    assert chi_square < 31.3  # 99.9 % quantile for 11 degrees of freedom, the most there can be


def test_a_seed_repeats_its_draws_and_another_does_not() -> None:
    logits = [random_logits(seed) for seed in range(20)]

    def draws(seed: int | None) -> list[int]:
        sampler = Sampler(Sampling(temperature=1.0, seed=seed))
        return [sampler.next_token(row) for row in logits]

    assert draws(3) == draws(3)
    assert draws(3) != draws(4)
    assert draws(-1) == draws(-1)
    assert draws(None) != draws(None)


def test_a_given_generator_is_the_one_drawn_from() -> None:
    logits, sampling = random_logits(0), Sampling(temperature=1.0, seed=1)
    tokens = [
        Sampler(sampling, torch.Generator().manual_seed(99)).next_token(logits) for _ in range(2)
    ]
    place = torch.rand((), generator=torch.Generator().manual_seed(99), dtype=torch.float64)
    mass = reference(logits, sampling).double().cumsum(0)
    assert tokens == [int((mass <= place * mass[-1]).sum())] * 2


def test_greedy_takes_the_best_whatever_the_other_parameters() -> None:
    logits = random_logits(5)
    sampler = Sampler(Sampling(temperature=0.0, top_k=3, top_p=0.1))
    assert sampler.next_token(logits) == int(logits.argmax())
    assert sampler.next_token(torch.tensor([1.0, 4.0, 4.0])) in (1, 2)


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 5e-324])
def test_a_tiny_temperature_is_greedy_and_not_a_number(temperature: float) -> None:
    logits = random_logits(2)
    sampler = Sampler(Sampling(temperature=temperature))
    assert sampler.probabilities(logits).max() == 1.0
    assert sampler.next_token(logits) == int(logits.argmax())


@pytest.mark.parametrize("options", [{"top_p": 1e-9}, {"top_k": 1}])
def test_the_tightest_filter_still_keeps_the_best(options: dict[str, Any]) -> None:
    logits = random_logits(3)
    sampler = Sampler(Sampling(temperature=1.0, **options))
    assert {sampler.next_token(logits) for _ in range(20)} == {int(logits.argmax())}


def test_a_top_k_beyond_the_vocabulary_changes_nothing() -> None:
    logits = random_logits(4)
    limited = Sampler(Sampling(temperature=1.0, top_k=10 * VOCABULARY)).probabilities(logits)
    assert torch.equal(limited, Sampler(Sampling(temperature=1.0)).probabilities(logits))


def test_forbidden_tokens_are_never_drawn() -> None:
    logits = torch.full((VOCABULARY,), -torch.inf)
    logits[[3, 8]] = torch.tensor([0.0, -50.0])
    sampler = Sampler(Sampling(temperature=100.0, seed=0))
    assert {sampler.next_token(logits) for _ in range(50)} == {3, 8}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "logits",
    [[0.0, float("nan"), 1.0], [0.0, float("inf")], [-float("inf")] * 3],
    ids=["nan", "infinity", "all forbidden"],
)
def test_logits_that_allow_no_choice_are_an_error(temperature: float, logits: list[float]) -> None:
    sampler = Sampler(Sampling(temperature=temperature))
    with pytest.raises(ModelError, match="best of the next token's logits"):
        sampler.next_token(torch.tensor(logits))


def test_sixteen_bit_logits_are_filtered_in_float32() -> None:
    logits = random_logits(6).bfloat16()
    sampler = Sampler(Sampling(temperature=0.7, top_k=20, top_p=0.9))
    assert sampler.probabilities(logits).dtype == torch.float32
    torch.testing.assert_close(sampler.probabilities(logits), sampler.probabilities(logits.float()))
