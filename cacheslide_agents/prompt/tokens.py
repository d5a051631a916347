"""Tokenises a rendered prompt once, so that only the template's own markup becomes control tokens.

In: text and the places of its markup. Out: ids, and for each token the character it ends before.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from cacheslide_agents.errors import TokenizerError
from cacheslide_agents.paths import expanded
from cacheslide_agents.prompt.control import (
    ControlTokens,
    PrivateTokenizer,
    private_tokenizer,
    withholding_tokenizer,
)
from cacheslide_agents.prompt.pieces import PieceEncoder, Tokens, encode_whole, joined

Place = tuple[int, int]
"""Characters [start, stop) of a text."""


def load_tokenizer(path: str | Path, **options: Any) -> Any:
    """A fast `transformers` tokenizer from a folder or hub id.

    `options` go to `AutoTokenizer.from_pretrained` (`gguf_file`, `revision`, ...). Raises
    `TokenizerError` when there is none or it is not a fast one.
    """
    from transformers import AutoTokenizer  # slow to import, and only needed here

    folder = expanded(path, "model")
    is_place = isinstance(path, Path) or path.startswith(("/", "~"))
    if not folder.is_dir() and (folder.exists() or is_place):
        raise TokenizerError(f"no tokenizer folder at {path}; give a folder or a hub id")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder if folder.is_dir() else path, **options)
    except Exception as error:  # transformers lets through whatever its readers raise
        raise TokenizerError(
            f"cannot load a tokenizer from {path}: {error}; it needs tokenizer.json or the files "
            "of a tokenizer that transformers can convert"
        ) from error
    fast_backend(tokenizer)
    return tokenizer


def fast_backend(tokenizer: Any) -> Tokenizer:
    """The `tokenizers.Tokenizer` inside; `TokenizerError` when there is none."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise TokenizerError(
            f"{type(tokenizer).__name__} is not a fast tokenizer: chunk borders need the character "
            "offsets that only tokenizers with a tokenizer.json give; convert it to one"
        )
    return backend


class MarkupTokenizer:
    """A tokenizer for prompts. Safe to call from several threads.

    Text equals what the tokenizer itself makes of it, but for control tokens outside the markup,
    which become plain text. An ordinary copy tokenises; only when control ids turn up that the
    markup does not explain, the prompt is tokenised again by a copy that withholds them.
    """

    def __init__(self, backend: Tokenizer, controls: ControlTokens) -> None:
        self._backend = backend
        self.controls = controls
        telling = [number for name, number in controls.all.items() if name != controls.unknown]
        self._is_control = np.zeros(1 + max(telling, default=0), bool)
        self._is_control[telling] = True

    @cached_property
    def _ordinary(self) -> _Reader:
        return _Reader(private_tokenizer(self._backend), self.controls)

    @cached_property
    def _withholding(self) -> _Reader:
        return _Reader(withholding_tokenizer(self._backend, self.controls.all), self.controls)

    def encode(self, text: str, markup: Sequence[Place]) -> Tokens:
        """`markup`: places of control tokens, in order. `TokenizerError` if text forges one."""
        names = [text[start:stop] for start, stop in markup]
        unknown = self.controls.unknown
        expected = [self.controls.all[name] for name in names if name != unknown]
        if unknown not in self.controls.all or text.count(unknown) == names.count(unknown):
            tokens = self._ordinary.read(text, markup)
            if self._control_ids(tokens.ids) == expected:
                return tokens
        tokens = self._withholding.read(text, markup)
        if self._control_ids(tokens.ids) == expected:
            return tokens
        raise TokenizerError(
            "the tokenizer makes control tokens out of plain text and cannot be kept from it; "
            "remove the control-token text from the prompt's values"
        )

    def _control_ids(self, ids: npt.NDArray[np.int64]) -> list[int]:
        low = ids[ids < len(self._is_control)]
        found: list[int] = low[self._is_control[low]].tolist()
        return found


class _Reader:
    """One tokenizer's way of reading a prompt: in pieces where it can be cut, else in one call."""

    def __init__(self, tokenizer: PrivateTokenizer, controls: ControlTokens) -> None:
        self._tokenizer = tokenizer
        self._controls = controls
        self._pieces: PieceEncoder | None = None
        if controls.cuttable and controls.roles:
            self._pieces = PieceEncoder(
                tokenizer.backend, tokenizer.name(next(iter(controls.roles)))
            )

    def read(self, text: str, markup: Sequence[Place]) -> Tokens:
        if self._pieces is None:
            return self._in_one_call(text, markup)
        parts, starts = [], []
        for start, stop, control in _stretches(text, markup):
            if control:
                number = self._controls.all[text[start:stop]]
                parts.append(Tokens(np.array([number]), np.array([stop - start])))
            elif start < stop:
                parts.append(self._pieces.encode(text[start:stop], first=start == 0))
            else:
                continue
            starts.append(start)
        if not parts:
            return Tokens(np.empty(0, np.int64), np.empty(0, np.int64))
        return joined(parts, starts)

    def _in_one_call(self, text: str, markup: Sequence[Place]) -> Tokens:
        """Control tokens under the tokenizer's names for them; ends in characters of `text`."""
        parts = [
            self._tokenizer.name(text[start:stop]) if control else text[start:stop]
            for start, stop, control in _stretches(text, markup)
        ]
        tokens = encode_whole(self._tokenizer.backend, "".join(parts))
        here = np.cumsum([len(part) for part in parts])
        there = np.array([stop for _, stop, _ in _stretches(text, markup)])
        part = np.searchsorted(here, tokens.ends)
        return Tokens(tokens.ids, tokens.ends - here[part] + there[part])


def _stretches(text: str, markup: Sequence[Place]) -> list[tuple[int, int, bool]]:
    """The whole text as (start, stop, is control), text and control tokens by turns."""
    borders = [0, *(border for place in markup for border in place), len(text)]
    return [(start, stop, i % 2 == 1) for i, (start, stop) in enumerate(pairwise(borders))]
