"""Counting tokens without a model."""

from __future__ import annotations

import pytest
import requests
import tiktoken

from cacheslide_agents.errors import TokenizerError
from cacheslide_agents.prompt.count import count_tokens


@pytest.fixture
def encoding() -> tiktoken.Encoding:
    """All bytes, and three merges; built here, nothing is fetched."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    ranks |= {b"he": 256, b"ll": 257, b"hell": 258}
    return tiktoken.Encoding(
        "tiny", pat_str=r"\w+|\W", mergeable_ranks=ranks, special_tokens={"<|end|>": 259}
    )


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> list[str]:
    """What was asked for, and refused."""
    asked: list[str] = []

    def refuse(url: str, *args: object, **kwargs: object) -> None:
        asked.append(url)
        raise requests.ConnectionError("no network")

    monkeypatch.setattr(requests, "get", refuse)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    return asked


def test_a_given_encoding_is_used(encoding: tiktoken.Encoding) -> None:
    assert count_tokens("hello", encoding) == len(["hell", "o"])
    assert count_tokens("", encoding) == 0


def test_control_text_is_counted_as_plain_text(encoding: tiktoken.Encoding) -> None:
    assert count_tokens("<|end|>", encoding) == len(["<", "|", *"end", "|", ">"])


def test_an_encoding_that_cannot_be_fetched_is_an_error_with_the_mend(offline: list[str]) -> None:
    with pytest.raises(TokenizerError, match=r"cannot fetch .*p50k_base.*TIKTOKEN_CACHE_DIR"):
        count_tokens("hello", "p50k_base")


@pytest.mark.parametrize(("text", "tokens"), [("", 0), ("a", 1), ("abcd", 1), ("äöü", 2)])
def test_the_fallback_is_a_quarter_of_the_bytes_rounded_up(
    offline: list[str], text: str, tokens: int
) -> None:
    assert count_tokens(text, "p50k_base", fallback="bytes") == tokens


def test_an_estimate_asks_for_the_encoding_once_and_a_count_every_time(offline: list[str]) -> None:
    estimates = [count_tokens("abcde", "r50k_base", fallback="bytes") for _ in range(3)]
    assert estimates == [2, 2, 2]
    assert len(offline) == 1
    with pytest.raises(TokenizerError):
        count_tokens("abcde", "r50k_base")
    assert len(offline) == 2


def test_an_unknown_encoding_is_named() -> None:
    with pytest.raises(TokenizerError, match=r"no encoding 'klingon'; known: .*cl100k_base"):
        count_tokens("hello", "klingon")
