"""A prompt cut into words, where no tokenizer is at hand.

In: a chunked prompt, or a text that was rendered elsewhere. Out: an `EncodedPrompt` whose tokens
are words, marks and white space. Good for comparing prompts; no model understands the ids.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Any

import numpy as np

from cacheslide_agents.chunks import Chunk, ChunkedPrompt, EncodedPrompt, Span, text_digest
from cacheslide_agents.prompt.ids import UniqueIds
from cacheslide_agents.prompt.pieces import Tokens, encode_whole
from cacheslide_agents.prompt.tokens import fast_backend
from cacheslide_agents.prompt.tools import checked_tools, written_out

_WORD = re.compile(r"\w+|\s+|[^\w\s]")
_PARAGRAPH = re.compile(r".+?(?:\n\s*\n|\Z)", re.DOTALL)


class WordEncoder:
    """Stands in for a `ChatEncoder`: each message is its role on a line, then its text."""

    def encode(
        self, prompt: ChunkedPrompt, *, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> EncodedPrompt:
        """Tools, calls and results are written out as text; spans as in `ChatEncoder.encode`."""
        pieces: list[tuple[Chunk, str]] = []
        before = ""
        for message in written_out(list(prompt.messages), checked_tools(tools)):
            before += f"{message.role}\n"
            for chunk in message.chunks:
                pieces.append((chunk, before + chunk.text))
                before = ""
            before += "\n\n"
        cue = Chunk("generation-prompt", f"{before}assistant\n")
        pieces.append((cue, cue.text))
        return _encoded(pieces, _words("".join(text for _, text in pieces)), prompt.task)


def encode_rendered(text: str, tokenizer: Any | None = None) -> EncodedPrompt:
    """A text that is the whole prompt already, control tokens included; its chunks are paragraphs.

    Without a `tokenizer` (a fast one of `transformers`) the tokens are words. Ids of paragraphs
    come from their content.
    """
    ids = UniqueIds()
    paragraphs = [match.group() for match in _PARAGRAPH.finditer(text)]
    chunks = [Chunk(ids.new(f"text-{text_digest(each)[:12]}"), each) for each in paragraphs]
    tokens = _words(text) if tokenizer is None else encode_whole(fast_backend(tokenizer), text)
    return _encoded(list(zip(chunks, paragraphs, strict=True)), tokens, "default")


def _words(text: str) -> Tokens:
    matches = list(_WORD.finditer(text))
    ids = np.fromiter((_id(match.group()) for match in matches), np.int64, len(matches))
    ends = np.fromiter((match.end() for match in matches), np.int64, len(matches))
    return Tokens(ids, ends)


@lru_cache(maxsize=1 << 16)
def _id(word: str) -> int:
    """The same in every process; 56 bits, so that no two words of a prompt share one."""
    return int.from_bytes(blake2b(word.encode("utf-8", "surrogatepass"), digest_size=7).digest())


def _encoded(pieces: Sequence[tuple[Chunk, str]], tokens: Tokens, task: str) -> EncodedPrompt:
    """`pieces`: chunks, each with its text in the prompt. A token across a border belongs to the
    later chunk.
    """
    spans, start, stop = [], 0, 0
    for chunk, text in pieces:
        stop += len(text)
        cut = int(np.searchsorted(tokens.ends, stop, side="right"))
        spans.append(Span(chunk.id, chunk.role, start, cut, chunk.digest))
        start = cut
    whole = "".join(text for _, text in pieces)
    ids, ends = tuple(tokens.ids.tolist()), tuple(tokens.ends.tolist())
    return EncodedPrompt(ids, tuple(spans), whole, task, ends)
