"""The figures of one row: distances between next-token distributions, and answer scores.

In: log-probabilities [tokens, vocabulary] of the dense run and of a policy; answers. Out: floats.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from cacheslide_agents.errors import BackendError

LogProbs = npt.NDArray[np.floating]
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def kl_divergence(dense: LogProbs, policy: LogProbs) -> float:
    """Mean over tokens of KL(dense || policy), natural logarithm, in float64.

    Rows are normalised again, so that float32 rounding cannot make the result negative.
    """
    p, q = _normalised(dense), _normalised(policy)
    if p.shape != q.shape:
        raise BackendError(f"scores of shapes {p.shape} and {q.shape} cannot be compared")
    possible = p > -np.inf
    gaps = np.subtract(p, q, out=np.zeros_like(p), where=possible)
    mean = float((np.exp(p) * gaps).sum(axis=1).mean())
    if not np.isfinite(mean):
        raise BackendError("a policy's scores rule out a token that the dense run allows")
    return max(0.0, mean)


def top1_agreement(dense: LogProbs, policy: LogProbs) -> float:
    """Share of tokens at which both distributions have the same most likely token."""
    return float((dense.argmax(axis=1) == policy.argmax(axis=1)).mean())


def _normalised(logprobs: LogProbs) -> npt.NDArray[np.float64]:
    rows = np.asarray(logprobs, dtype=np.float64)
    if rows.ndim != 2 or not rows.size or np.isnan(rows).any():
        raise BackendError(
            f"scores of shape {rows.shape} are empty or hold NaN; "
            "a backend must give one finite distribution per token"
        )
    top = rows.max(axis=1, keepdims=True)
    normalised: npt.NDArray[np.float64] = (
        rows - top - np.log(np.exp(rows - top).sum(axis=1, keepdims=True))
    )
    return normalised


def first_line(text: str) -> str:
    """Short answers are one line; what a model adds below is not part of them."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def normalise_answer(text: str) -> str:
    """SQuAD's normal form: lower case, no punctuation, no articles, single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(answer: str, gold: Sequence[str]) -> float:
    """1.0 when the normal forms of `answer` and of one gold answer are equal, else 0.0."""
    return float(any(normalise_answer(answer) == normalise_answer(one) for one in gold))


def token_f1(answer: str, gold: Sequence[str]) -> float:
    """Best word-overlap F1 of `answer` with the gold answers (SQuAD)."""
    return max((_f1(answer, one) for one in gold), default=0.0)


def _f1(answer: str, gold: str) -> float:
    said, wanted = normalise_answer(answer).split(), normalise_answer(gold).split()
    if not said or not wanted:
        return float(said == wanted)
    common = sum((Counter(said) & Counter(wanted)).values())
    if not common:
        return 0.0
    precision, recall = common / len(said), common / len(wanted)
    return 2 * precision * recall / (precision + recall)
