"""Streaming text: what comes out bit by bit equals decoding everything, cut at the first stop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers.pre_tokenizers import ByteLevel

from torch_cacheslide.detokenize import ByteLevelDetokenizer, WindowDetokenizer, detokenizer_of
from torch_cacheslide.stops import StopFinder
from torch_cacheslide.text import TextStream

WORDS = "Grüße 你好。世界 こんにちは 👩‍🚀 e\u0301 \U0001d11e naïve don't  x .\n\n\tЯ люблю"
PROPERTY = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
Tokenizers = Callable[[str], Any]


def decoded(tokenizer: Any, ids: Sequence[int]) -> str:
    text: str = tokenizer.decode(
        list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    return text


def streamed(stream: TextStream, ids: Sequence[int]) -> list[str]:
    """The deltas of `ids` and of the final flush."""
    deltas = []
    for token in ids:
        text, finished = stream.push(token)
        deltas.append(text)
        if finished:
            break
    return [*deltas, stream.flush()]


def cut(text: str, stops: Sequence[str]) -> str:
    """Reference: up to the stop string that is completed first; of several, the longest."""
    for end in range(len(text) + 1):
        completed = [stop for stop in stops if text[:end].endswith(stop)]
        if completed:
            return text[: end - max(map(len, completed))]
    return text


@PROPERTY
@given(data=st.data())
def test_the_deltas_of_any_ids_are_the_decoded_text(tokenizer: Any, data: st.DataObject) -> None:
    token = st.integers(0, len(tokenizer) + 2)  # some ids beyond the vocabulary, as models have
    ids = data.draw(st.lists(token, max_size=60))
    assert "".join(streamed(TextStream(tokenizer), ids)) == decoded(tokenizer, ids)


def test_an_end_token_that_was_added_as_a_plain_one_is_text(tokenizers: Tokenizers) -> None:
    tokenizer = tokenizers("phi3")
    (end,) = tokenizer.convert_tokens_to_ids(["<|end|>"])
    assert "".join(streamed(TextStream(tokenizer), [end])) == decoded(tokenizer, [end]) == "<|end|>"


@PROPERTY
@given(text=st.text(alphabet=st.sampled_from(WORDS), max_size=80))
def test_the_deltas_of_encoded_text_are_the_decoded_text(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert "".join(streamed(TextStream(tokenizer), ids)) == decoded(tokenizer, ids)


@PROPERTY
@given(data=st.data())
def test_runs_of_byte_pieces_valid_or_not_are_the_decoded_text(
    tokenizers: Tokenizers, data: st.DataObject
) -> None:
    tokenizer = tokenizers("mistral")
    pieces = [f"<0x{byte:02X}>" for byte in (0x41, 0xC3, 0xA9, 0xE2, 0x82, 0xAC, 0xF0, 0xFF)]
    some = st.sampled_from([*tokenizer.convert_tokens_to_ids(pieces), 5, 300, 301, 1])
    ids = data.draw(st.lists(some, max_size=30))
    assert "".join(streamed(TextStream(tokenizer), ids)) == decoded(tokenizer, ids)


def test_no_delta_holds_half_a_character(tokenizer: Any) -> None:
    ids = tokenizer(WORDS, add_special_tokens=False)["input_ids"]
    deltas = streamed(TextStream(tokenizer), ids)
    assert len(ids) > 20
    assert "".join(deltas) == decoded(tokenizer, ids)
    assert not any("\N{REPLACEMENT CHARACTER}" in delta for delta in deltas)


def byte_pieces(tokenizer: Any, text: str) -> list[int]:
    """The ids of the single bytes of `text` in a byte-level tokenizer."""
    alphabet = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)[0][0]
    ids: list[int] = tokenizer.convert_tokens_to_ids(list(alphabet))
    return ids


def test_a_character_appears_with_its_last_byte(tokenizers: Tokenizers) -> None:
    tokenizer = tokenizers("qwen")
    stream = TextStream(tokenizer)
    ids = byte_pieces(tokenizer, "a\N{ROCKET}b")
    deltas = [stream.push(token)[0] for token in ids]
    assert deltas == ["a", "", "", "", "\N{ROCKET}", "b"]


def test_an_unfinished_character_is_a_replacement_at_the_end(tokenizers: Tokenizers) -> None:
    tokenizer = tokenizers("qwen")
    ids = byte_pieces(tokenizer, "a\N{ROCKET}")[:-1]
    assert streamed(TextStream(tokenizer), ids) == ["a", "", "", "", "\N{REPLACEMENT CHARACTER}"]
    assert decoded(tokenizer, ids) == "a\N{REPLACEMENT CHARACTER}"


def test_the_leading_space_of_sentencepiece_is_stripped_once_only(tokenizers: Tokenizers) -> None:
    tokenizer = tokenizers("mistral")
    ids = tokenizer.convert_tokens_to_ids(["▁the", "▁", "▁", "▁agent", "<s>", "▁", "n"])
    assert "".join(streamed(TextStream(tokenizer), ids)) == "the   agent n"


def test_each_tokenizer_family_gets_its_detokenizer(tokenizers: Tokenizers) -> None:
    assert isinstance(detokenizer_of(tokenizers("llama3")), ByteLevelDetokenizer)
    assert isinstance(detokenizer_of(tokenizers("mistral")), WindowDetokenizer)


def test_both_detokenizers_agree_on_byte_level_pieces(tokenizers: Tokenizers) -> None:
    qwen = tokenizers("qwen")
    ids = qwen(WORDS, add_special_tokens=False)["input_ids"]
    window = WindowDetokenizer(qwen)
    assert "".join([*map(window.push, ids), window.flush()]) == decoded(qwen, ids)


def test_each_token_costs_a_bounded_amount_of_decoding(tokenizers: Tokenizers) -> None:
    tokenizer = tokenizers("mistral")
    decoded_ids: list[int] = []

    def decode(ids: list[int], **_: Any) -> str:
        decoded_ids.extend(ids)
        return decoded(tokenizer, ids)

    counting = SimpleNamespace(
        decode=decode,
        convert_ids_to_tokens=tokenizer.convert_ids_to_tokens,
        added_tokens_decoder=tokenizer.added_tokens_decoder,
        all_special_ids=tokenizer.all_special_ids,
    )
    ids = tokenizer(WORDS * 40, add_special_tokens=False)["input_ids"]
    detokenizer: Any = WindowDetokenizer(counting)
    assert "".join([*map(detokenizer.push, ids), detokenizer.flush()]) == decoded(tokenizer, ids)
    assert len(decoded_ids) <= 4 * len(ids)


LETTERS = st.text(alphabet="ab\n", max_size=30)
STOPS = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=5), max_size=4)


@settings(max_examples=300)
@given(text=LETTERS, stops=STOPS, cuts=st.lists(st.integers(0, 30), max_size=8))
def test_text_ends_before_the_first_stop_wherever_the_pieces_are_cut(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    finder = StopFinder(stops)
    shown, found = "", False
    edges = sorted({0, len(text), *(place for place in cuts if place < len(text))})
    for start, stop in pairwise(edges):
        piece, found = finder.feed(text[start:stop])
        shown += piece
        assert cut(text, stops).startswith(shown)
        if found:
            break
    shown += finder.flush()
    assert shown == cut(text, stops)
    assert found == any(stop in text for stop in stops)


@PROPERTY
@given(stops=STOPS, text=LETTERS)
def test_stop_strings_that_straddle_tokens_are_cut(
    tokenizer: Any, stops: list[str], text: str
) -> None:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert "".join(streamed(TextStream(tokenizer, stops), ids)) == cut(
        decoded(tokenizer, ids), stops
    )


@pytest.mark.parametrize(
    ("pieces", "stops", "deltas"),
    [
        (["x\n", "\nOb", "ject"], ["\n\nObservation"], ["x", "", "\n\nObject"]),
        (["x\n", "\nObserv", "ation: y"], ["\n\nObservation"], ["x", "", ""]),
        (["say THE", " END now"], ["END", "THE END"], ["say ", ""]),
        (["aab", "aac"], ["aabaad"], ["", "aabaac"]),
        (["abc"], ["b", "abcd"], ["a"]),
    ],
)
def test_text_that_may_begin_a_stop_string_is_held_until_decided(
    pieces: list[str], stops: list[str], deltas: list[str]
) -> None:
    finder = StopFinder(stops)
    assert [finder.feed(piece)[0] for piece in pieces] == deltas


def test_an_end_token_finishes_releases_held_text_and_adds_none(tokenizers: Tokenizers) -> None:
    tokenizer = tokenizers("llama3")
    end, newline = tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("Ċ")
    letter = tokenizer.convert_tokens_to_ids("a")
    for options in ({"eos_ids": (end,)}, {"stop_token_ids": (end,)}):
        stream = TextStream(tokenizer, ["\n\n"], **options)
        assert [stream.push(token) for token in (letter, newline)] == [("a", False), ("", False)]
        assert stream.push(end) == ("\n", True)
        assert stream.push(letter) == ("", True)
        assert stream.flush() == ""
    plain = TextStream(tokenizer, stop_token_ids=(newline,))
    assert [plain.push(token) for token in (letter, newline)] == [("a", False), ("", True)]


def test_without_end_tokens_a_special_token_is_skipped_and_the_answer_goes_on(
    tokenizers: Tokenizers,
) -> None:
    tokenizer = tokenizers("llama3")
    ids = tokenizer.convert_tokens_to_ids(["a", tokenizer.eos_token, "b"])
    assert streamed(TextStream(tokenizer), ids) == ["a", "", "b", ""]


def test_a_stop_string_completed_by_the_flush_is_cut(tokenizers: Tokenizers) -> None:
    tokenizer = tokenizers("mistral")
    ids = tokenizer.convert_tokens_to_ids(["a", "<0xC3>", "<0xA9>"])
    stream = TextStream(tokenizer, ["é"])
    assert [stream.push(token) for token in ids] == [("a", False), ("", False), ("", False)]
    assert stream.flush() == ""
