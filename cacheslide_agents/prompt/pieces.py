"""Tokenises long text piece by piece, from a cache, with the ids that one call would give.

In: text between control tokens. Out: ids and end offsets. An agent sends nearly the same text again
every turn, and pre-tokenising it costs several microseconds a token; a piece seen before is free.

A piece never ends at a chunk's border. It ends where the tokenizer is bound to start a new token
whatever stands on either side: at a control token, and, for byte-level BPE with GPT-2's
pre-tokenising expression or one of those below, between a letter and a space that a letter
follows. No alternative of those expressions matches a space after a letter, and their only
look-ahead, `\\s+(?!\\S)`, cannot end at a letter.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

CACHE_CHARACTERS = 8_000_000
"""About two million tokens of English, 32 MB of ids and offsets."""

_SPLIT_EXPRESSIONS = frozenset(
    {
        # cl100k, Llama 3
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        # Qwen 2 and 3
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    }
)

_CUT = re.compile(r"[.!?\n] ?[A-Za-z]+(?= [A-Za-z])")
"""The first word of a sentence or line; found by content, so that an edit moves no other cut."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """`ids` int64 [n], and for each token the offset int64 [n] of the character it ends before."""

    ids: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]


def encode_whole(backend: Tokenizer, text: str) -> Tokens:
    encoding = backend.encode(text, add_special_tokens=False)
    ends = np.fromiter((end for _, end in encoding.offsets), np.int64, len(encoding.ids))
    return Tokens(np.array(encoding.ids, np.int64), np.maximum.accumulate(ends))


def joined(parts: Sequence[Tokens], starts: Sequence[int]) -> Tokens:
    """One text's tokens from those of its parts, each of which starts at a character offset."""
    lengths = [len(part.ids) for part in parts]
    ids = np.concatenate([part.ids for part in parts])
    ends = np.concatenate([part.ends for part in parts]) + np.repeat(starts, lengths)
    return Tokens(ids, ends)


class PieceEncoder:
    """Encodes stretches of text that hold no control token. Safe to call from several threads.

    `anchor`: a control token put before every stretch but the first of a text, so that a tokenizer
    that marks the beginning of a text (SentencePiece) does not take the stretch for one.
    """

    def __init__(self, backend: Tokenizer, anchor: str) -> None:
        self._backend = backend
        self._anchor = anchor
        self._cut = _CUT if cuts_at_words(backend) else None
        self._cache: OrderedDict[tuple[bool, str], Tokens] = OrderedDict()
        self._held = 0
        self._lock = Lock()

    def encode(self, text: str, *, first: bool) -> Tokens:
        """Tokens of a whole stretch; ends count from its start."""
        known = self._known(first, text)
        if known is not None:
            return known
        cuts = [match.end() for match in self._cut.finditer(text)] if self._cut else []
        bounds = list(pairwise((0, *cuts, len(text))))
        parts = [self._known(first and start == 0, text[start:stop]) for start, stop in bounds]
        for missing, run in groupby(range(len(parts)), lambda index: parts[index] is None):
            if missing:
                indices = list(run)
                where = slice(indices[0], indices[-1] + 1)
                parts[where] = self._filled(bounds[where], text, first)
        tokens = joined([part for part in parts if part is not None], [0, *cuts])
        self._remember(first, text, tokens)
        return tokens

    def _filled(self, bounds: list[tuple[int, int]], text: str, first: bool) -> list[Tokens]:
        """Neighbouring unknown pieces, tokenised in one call."""
        begin, taken, parts = bounds[0][0], 0, []
        fresh = self._fresh(text[begin : bounds[-1][1]], first and begin == 0)
        for start, stop in bounds:
            upto = int(np.searchsorted(fresh.ends, stop - begin, side="right"))
            part = Tokens(fresh.ids[taken:upto].copy(), fresh.ends[taken:upto] - (start - begin))
            self._remember(first and start == 0, text[start:stop], part)
            parts.append(part)
            taken = upto
        return parts

    def _known(self, first: bool, text: str) -> Tokens | None:
        with self._lock:
            found = self._cache.get((first, text))
            if found is not None:
                self._cache.move_to_end((first, text))
            return found

    def _remember(self, first: bool, text: str, tokens: Tokens) -> None:
        with self._lock:
            if (first, text) not in self._cache:
                self._held += len(text)
            self._cache[first, text] = tokens
            while self._held > CACHE_CHARACTERS:
                (_, dropped), _ = self._cache.popitem(last=False)
                self._held -= len(dropped)

    def _fresh(self, text: str, first: bool) -> Tokens:
        if first or not text:
            return encode_whole(self._backend, text)
        tokens = encode_whole(self._backend, self._anchor + text)
        return Tokens(tokens.ids[1:], tokens.ends[1:] - len(self._anchor))


def cuts_at_words(backend: Tokenizer) -> bool:
    """Whether the tokenizer is known to start a token at every space between two letters."""
    return (
        _state(backend.normalizer).get("type") in (None, "NFC")
        and _splits_at_words(_state(backend.pre_tokenizer))
        and not any(
            token.lstrip or token.rstrip or token.single_word or re.search(r"\S \S", token.content)
            for token in backend.get_added_tokens_decoder().values()
        )
    )


def _state(component: Any) -> dict[str, Any]:
    state: dict[str, Any] = {} if component is None else json.loads(component.__getstate__())
    return state


def _splits_at_words(pre_tokenizer: dict[str, Any]) -> bool:
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    kinds = [step.get("type") for step in steps]
    if kinds[-1:] != ["ByteLevel"] or steps[-1]["add_prefix_space"]:
        return False
    if kinds[:-1] in ([], ["Digits"]):
        return bool(steps[-1]["use_regex"])
    return (
        kinds[:-1] == ["Split"]
        and steps[0]["pattern"].get("Regex") in _SPLIT_EXPRESSIONS
        and steps[0]["behavior"] == "Isolated"
    )
