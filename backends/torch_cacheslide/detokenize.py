"""Token ids into text, one at a time, at a bounded price per token.

In: a tokenizer and its ids. Out: pieces of text that together equal decoding all ids at once with
special tokens skipped and no clean-up of spaces. A character comes out when all its bytes are in.
"""

from __future__ import annotations

import codecs
import re
from copy import copy
from typing import Any, Protocol, Self

from tokenizers import decoders
from transformers import PreTrainedTokenizerBase

_BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class Detokenizer(Protocol):
    """Text that became certain with a token, and at the end whatever is left.

    `fork` gives another text that begins like this one.
    """

    def push(self, token: int) -> str: ...
    def flush(self) -> str: ...
    def fork(self) -> Self: ...


def detokenizer_of(tokenizer: PreTrainedTokenizerBase) -> Detokenizer:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if isinstance(getattr(backend, "decoder", None), decoders.ByteLevel):
        return ByteLevelDetokenizer(tokenizer)
    return WindowDetokenizer(tokenizer)


class ByteLevelDetokenizer:
    """Byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM2): every piece spells bytes of UTF-8."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer: Any = tokenizer
        self._special = special_ids(tokenizer)
        self._byte_of = _byte_letters()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        if token in self._special:
            return ""
        return self._utf8.decode(self._bytes(self._tokenizer.convert_ids_to_tokens(token)))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)

    def fork(self) -> Self:
        twin = copy(self)
        twin._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        twin._utf8.setstate(self._utf8.getstate())
        return twin

    def _bytes(self, piece: str | None) -> bytes:
        """Added tokens may hold letters that spell no byte; then the piece is plain text."""
        try:
            return bytes(self._byte_of[letter] for letter in piece or "")
        except KeyError:
            return (piece or "").encode()


class WindowDetokenizer:
    """Any other tokenizer: decodes the last settled token and what came after it.

    The settled token keeps a decoder that strips the leading space of a text (SentencePiece) from
    doing so in mid-text. Byte-fallback pieces wait for the end of their run, because one stray byte
    makes the decoder replace the whole run.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer: Any = tokenizer
        self._special = special_ids(tokenizer)
        self._window: list[int] = []
        self._settled = 0  # leading characters of the window's text that were handed out

    def push(self, token: int) -> str:
        piece = None if token in self._special else self._tokenizer.convert_ids_to_tokens(token)
        if not piece:
            return ""
        self._window.append(token)
        if _BYTE_PIECE.fullmatch(piece):
            return ""
        text = self._decode(self._window)
        if text.endswith(_INCOMPLETE):
            return ""
        fresh = text[self._settled :]
        self._window = [token]
        self._settled = len(self._decode(self._window))
        return fresh

    def flush(self) -> str:
        fresh = self._decode(self._window)[self._settled :]
        self._window, self._settled = [], 0
        return fresh

    def fork(self) -> Self:
        twin = copy(self)
        twin._window = self._window.copy()
        return twin

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(
            tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text


def special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """What `skip_special_tokens` skips: every added token marked special, named or not.

    A token that is named (as the end, say) but was added as a plain one is text.
    """
    added: dict[int, Any] = tokenizer.added_tokens_decoder
    marked = (token_id for token_id, token in added.items() if token.special)
    return frozenset((*marked, *(each for each in tokenizer.all_special_ids if each not in added)))


def _byte_letters() -> dict[str, int]:
    """GPT-2's letters for bytes: printable ones for themselves, the others from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    letters = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(0x100) if byte not in printable)
    return letters | {chr(0x100 + place): byte for place, byte in enumerate(others)}
