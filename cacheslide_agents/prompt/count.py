"""Token counts without a model.

In: text. Out: how many tokens it has in one of tiktoken's encodings, or an estimate.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

import tiktoken

from cacheslide_agents.errors import TokenizerError

BYTES_PER_TOKEN = 4
"""Of English text in large vocabularies; other languages and code have fewer bytes a token."""


def count_tokens(
    text: str,
    encoding: str | tiktoken.Encoding = "cl100k_base",
    *,
    fallback: Literal["bytes"] | None = None,
) -> int:
    """Tokens of `text`; control-token text in it counts as the plain text it is.

    `encoding`: a tiktoken encoding or its name. tiktoken downloads a named encoding on first use;
    where it cannot, `TokenizerError` says so, or with `fallback="bytes"` the result is the number
    of UTF-8 bytes divided by four, rounded up: from then on, without another try.
    """
    if not isinstance(encoding, str):
        found: tiktoken.Encoding | None = encoding
    else:
        found = _encoding_or_none(encoding) if fallback == "bytes" else _encoding(encoding)
    if found is None:
        return -(-len(text.encode("utf-8", "surrogatepass")) // BYTES_PER_TOKEN)
    return len(found.encode(text, disallowed_special=()))


@lru_cache
def _encoding_or_none(name: str) -> tiktoken.Encoding | None:
    try:
        return _encoding(name)
    except TokenizerError:
        return None


@lru_cache
def _encoding(name: str) -> tiktoken.Encoding:
    if name not in tiktoken.list_encoding_names():
        known = ", ".join(tiktoken.list_encoding_names())
        raise TokenizerError(f"tiktoken has no encoding {name!r}; known: {known}")
    try:
        return tiktoken.get_encoding(name)
    except Exception as error:  # tiktoken lets through whatever its downloader raises
        raise TokenizerError(
            f"tiktoken cannot fetch the encoding {name!r} ({type(error).__name__}); set "
            "TIKTOKEN_CACHE_DIR to a folder that holds it, count with the model's own tokenizer, "
            "or pass fallback='bytes' for an estimate"
        ) from error
