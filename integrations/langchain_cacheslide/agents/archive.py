"""Search in what a companion has put away.

In: passages and a query. Out: the passages that share words with it, best first.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from math import log

_WORD = re.compile(r"\w+")
_SATURATION, _LENGTH = 1.2, 0.75


def search(passages: Sequence[str], query: str) -> list[str]:
    """Okapi BM25 (Robertson et al. 1994) with its usual constants; newer passages win ties."""
    counts = [Counter(_words(passage)) for passage in passages]
    mean = sum(map(Counter.total, counts)) / max(1, len(counts)) or 1.0
    rarity = {word: _rarity(word, counts) for word in set(_words(query))}
    scores = [
        sum(
            weight * count[word] * (_SATURATION + 1) / (count[word] + _damping(count, mean))
            for word, weight in rarity.items()
        )
        for count in counts
    ]
    ranked = sorted(range(len(passages)), key=lambda index: (-scores[index], -index))
    return [passages[index] for index in ranked if scores[index] > 0]


def _rarity(word: str, counts: Sequence[Counter[str]]) -> float:
    holding = sum(word in count for count in counts)
    return log(1 + (len(counts) - holding + 0.5) / (holding + 0.5))


def _damping(count: Counter[str], mean: float) -> float:
    return _SATURATION * (1 - _LENGTH + _LENGTH * count.total() / mean)


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())
