"""Text to train on, as windows of token ids.

In: JSONL files with a `text` field, a tokenizer. Out: window number i of a given length, the same
on every run: nothing is remembered between windows, so a resumed run needs no reader state.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cacheslide_agents.errors import DataError


def read_texts(paths: Iterable[Path]) -> list[str]:
    """The `text` of every line. Raises `DataError` with file and line."""
    texts = []
    for path in paths:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{path}: cannot be read as UTF-8 text ({error})") from error
        for number, line in enumerate(lines, 1):
            if line.strip():
                texts.append(_text_of(line, f"{path}:{number}"))
    return texts


def _text_of(line: str, place: str) -> str:
    try:
        text = json.loads(line)["text"]
    except (ValueError, KeyError, TypeError, RecursionError):
        text = None
    if not isinstance(text, str) or not text:
        raise DataError(f"{place}: must be a JSON object whose `text` is a string, not empty")
    return text


class Corpus:
    """Texts joined by the end token in an order that `seed` gives: `ids` int64 [tokens]."""

    def __init__(self, texts: Sequence[str], tokenizer: Any, seed: int) -> None:
        order = np.random.default_rng(seed).permutation(len(texts))
        encoded = tokenizer([texts[i] for i in order], add_special_tokens=False)["input_ids"]
        end = tokenizer.eos_token_id
        joined = [id_ for ids in encoded for id_ in (*ids, *([] if end is None else [end]))]
        self.ids: npt.NDArray[np.int64] = np.asarray(joined, dtype=np.int64)
        self._seed = seed

    def __len__(self) -> int:
        """Tokens."""
        return len(self.ids)

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.ids.tobytes()).hexdigest()

    def window(self, index: int, length: int) -> npt.NDArray[np.int64]:
        """`length` tokens from a place that depends on seed and `index` alone."""
        if length > len(self.ids):
            raise DataError(
                f"the training text has {len(self.ids)} tokens, a window needs {length}; give "
                "more text, or shorter lengths"
            )
        random = np.random.default_rng((self._seed, index))
        start = int(random.integers(0, len(self.ids) - length + 1))
        return self.ids[start : start + length]
