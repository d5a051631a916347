"""Text to train on, as windows of token ids.

In: JSONL files with a `text` field, a tokenizer. Out: window number i of a given length, the same
on every run: nothing is remembered between windows, so a resumed run needs no reader state.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence, Sized
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cacheslide_agents.chunks import not_unicode
from cacheslide_agents.errors import DataError
from cacheslide_agents.foreign_json import json_lines


def read_texts(paths: Iterable[Path]) -> list[str]:
    """The `text` of every line. Raises `DataError` with file and line."""
    texts = []
    for path in paths:
        try:
            texts += [_text_of(record, place) for place, record in json_lines(path)]
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{path}: cannot be read as UTF-8 text ({error})") from error
    return texts


def _text_of(record: Any, place: str) -> str:
    text = record.get("text") if isinstance(record, dict) else None
    if not isinstance(text, str) or not text:
        raise DataError(f"{place}: must be a JSON object whose `text` is a string, not empty")
    if wrong := not_unicode(text):
        raise DataError(f"{place}: `text` {wrong}")
    return text


def check_room(ids: Sized, lengths: Iterable[int], what: str, mend: str) -> None:
    """`DataError` unless the `ids` of text `what` fill a window of each of the lengths."""
    if (longest := max(lengths)) > len(ids):
        raise DataError(f"{what} has {len(ids)} tokens, a window needs {longest}; {mend}")


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

    def check(self, lengths: Iterable[int]) -> None:
        """`DataError` unless there are windows of all `lengths`."""
        mend = "give more text, or shorter lengths"
        check_room(self.ids, lengths, "the training text", mend)

    def window(self, index: int, length: int) -> npt.NDArray[np.int64]:
        """`length` tokens from a place that depends on seed and `index` alone."""
        self.check([length])
        random = np.random.default_rng((self._seed, index))
        start = int(random.integers(0, len(self.ids) - length + 1))
        return self.ids[start : start + length]
