"""Figures of one row against torch's own divergence and against hand-counted words."""

import numpy as np
import pytest
import torch

from cacheslide_agents.bench.metrics import (
    exact_match,
    kl_divergence,
    normalise_answer,
    token_f1,
    top1_agreement,
)
from cacheslide_agents.errors import BackendError


def distributions(seed: int, tokens: int = 5, vocabulary: int = 40) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.log_softmax(3 * torch.randn(tokens, vocabulary, generator=generator), dim=-1)


def test_kl_is_torchs_divergence_averaged_over_tokens() -> None:
    dense, policy = distributions(0), distributions(1)
    expected = torch.nn.functional.kl_div(
        policy.double(), dense.double(), reduction="batchmean", log_target=True
    )
    assert kl_divergence(dense.numpy(), policy.numpy()) == pytest.approx(float(expected), rel=1e-5)


def test_kl_of_two_coins_is_the_textbook_value() -> None:
    fair, biased = np.log([[0.5, 0.5]]), np.log([[0.9, 0.1]])
    assert kl_divergence(fair, biased) == pytest.approx(0.5 * np.log(0.5 / 0.9) + 0.5 * np.log(5))


def test_kl_of_a_distribution_to_itself_is_zero_in_float32() -> None:
    dense = distributions(2).numpy().astype(np.float32)
    assert kl_divergence(dense, dense.copy()) == 0.0


def test_a_token_the_dense_run_rules_out_adds_nothing() -> None:
    dense = np.array([[0.0, -np.inf]])
    assert kl_divergence(dense, np.log([[0.25, 0.75]])) == pytest.approx(np.log(4))


def test_a_policy_that_rules_out_an_allowed_token_is_refused() -> None:
    with pytest.raises(BackendError, match="rule out a token"):
        kl_divergence(np.log([[0.25, 0.75]]), np.array([[0.0, -np.inf]]))


@pytest.mark.parametrize(
    "broken", [np.full((2, 3), np.nan), np.empty((0, 3)), np.zeros(3)], ids=["nan", "empty", "flat"]
)
def test_scores_that_are_no_distributions_are_refused(broken: np.ndarray) -> None:
    with pytest.raises(BackendError, match="finite distribution per token"):
        kl_divergence(broken, broken)


def test_top1_counts_the_tokens_with_the_same_favourite() -> None:
    dense = np.log([[0.6, 0.4], [0.6, 0.4], [0.1, 0.9], [0.1, 0.9]])
    policy = np.log([[0.9, 0.1], [0.2, 0.8], [0.3, 0.7], [0.4, 0.6]])
    assert top1_agreement(dense, policy) == 0.75


def test_answers_are_compared_in_squads_normal_form() -> None:
    assert normalise_answer("  The  Sam-Boyd Stadium, an arena. ") == "samboyd stadium arena"
    assert exact_match("the Roman.", ["Greek", "roman"]) == 1.0
    assert exact_match("Romans", ["Roman"]) == 0.0


@pytest.mark.parametrize(
    ("answer", "gold", "expected"),
    [
        ("John Ford", ["John Ford"], 1.0),
        ("director John Ford", ["John Ford"], 0.8),  # precision 2/3, recall 1
        ("Ford Ford", ["John Ford"], 0.5),  # a word counts as often as the gold answer has it
        ("Jimmy Ellis", ["John Ford"], 0.0),
        ("Ford", ["Jimmy Ellis", "John Ford"], 2 / 3),  # the best gold answer counts
        ("", ["John Ford"], 0.0),
        ("the", ["a"], 1.0),  # both are empty in normal form
    ],
)
def test_f1_is_the_harmonic_mean_of_word_precision_and_recall(
    answer: str, gold: list[str], expected: float
) -> None:
    assert token_f1(answer, gold) == pytest.approx(expected)
