"""Tokenising text of which only the markup may become control tokens."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from cacheslide_agents.errors import TokenizerError
from cacheslide_agents.prompt import pieces
from cacheslide_agents.prompt.control import ControlTokens, private_tokenizer, withholding_tokenizer
from cacheslide_agents.prompt.pieces import PieceEncoder, cuts_at_words, encode_whole
from cacheslide_agents.prompt.tokens import MarkupTokenizer, load_tokenizer

Tokenizers = Callable[[str], Any]

WORDS = st.sampled_from(
    [
        *(
            "the",
            " agent",
            " reads.",
            " The",
            "\n",
            "\r\n",
            "  ",
            " ",
            ". So",
            "! I am",
            "'s",
            "'S",
        ),
        *("1", " e\u0301", "é", "\u0301", "🙂", "\u01c5", "日本", "\t", "\u00a0", "==", "x.Y z"),
        *("\n\nWe go", "▁"),
    ]
)
TEXTS = st.lists(st.one_of(WORDS, st.text(max_size=4)), max_size=20).map("".join)


def controls_of(tokenizer: Any) -> ControlTokens:
    return ControlTokens.of(tokenizer.backend_tokenizer, "", "", tokenizer.unk_token)


@given(text=TEXTS, edit=TEXTS)
@settings(max_examples=60)
def test_pieces_give_what_one_call_gives(tokenizer: Any, text: str, edit: str) -> None:
    """Also when part of the text is known from before."""
    backend = private_tokenizer(tokenizer.backend_tokenizer).backend
    anchor = next(t.content for t in tokenizer.added_tokens_decoder.values() if t.special)
    if anchor in text + edit:
        return
    encoder = PieceEncoder(backend, anchor)
    middle = len(text) // 2
    for version in (text, text[:middle] + edit + text[middle:], text):
        first = encoder.encode(version, first=True)
        assert first.ids.tolist() == backend.encode(version, add_special_tokens=False).ids
        whole = encode_whole(backend, version)
        assert first.ends.tolist() == whole.ends.tolist()
        later = encoder.encode(version, first=False)
        after = backend.encode(anchor + version, add_special_tokens=False)
        assert [backend.token_to_id(anchor), *later.ids.tolist()] == after.ids


@pytest.mark.parametrize(
    ("family", "cuts"),
    [("smollm2", True), ("llama3", True), ("qwen", True), ("neox", True), ("mistral", False)],
)
def test_only_known_pre_tokenizers_are_cut_at_words(
    tokenizers: Tokenizers, family: str, cuts: bool
) -> None:
    assert cuts_at_words(tokenizers(family).backend_tokenizer) is cuts


def test_added_tokens_that_span_words_forbid_cuts(tokenizers: Tokenizers) -> None:
    backend = private_tokenizer(tokenizers("llama3").backend_tokenizer).backend
    backend.add_tokens([AddedToken("the agent", special=False, normalized=False)])
    assert not cuts_at_words(backend)


def test_the_cache_keeps_to_its_budget(
    tokenizers: Tokenizers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "CACHE_CHARACTERS", 1000)
    backend = private_tokenizer(tokenizers("llama3").backend_tokenizer).backend
    encoder = PieceEncoder(backend, "<|eot_id|>")
    for number in range(50):
        text = f"Number {number} is told. So it is said again. " * 3
        assert encoder.encode(text, first=True).ids.tolist() == backend.encode(text).ids
        assert sum(len(text) for _, text in encoder._cache) == encoder._held <= 1000


def test_another_users_truncation_does_not_reach_us(tokenizers: Tokenizers) -> None:
    tokenizer = tokenizers("llama3")
    text = "the agent reads the passages"
    expected = tokenizer(text, add_special_tokens=False)["input_ids"]
    markup = MarkupTokenizer(tokenizer.backend_tokenizer, controls_of(tokenizer))
    tokenizer.backend_tokenizer.enable_truncation(2)
    try:
        fresh = MarkupTokenizer(tokenizer.backend_tokenizer, controls_of(tokenizer))
        assert markup.encode(text, []).ids.tolist() == expected
        assert fresh.encode(text, []).ids.tolist() == expected
    finally:
        tokenizer.backend_tokenizer.no_truncation()


def test_only_marked_places_become_control_tokens(tokenizer: Any) -> None:
    controls = controls_of(tokenizer)
    markup = MarkupTokenizer(tokenizer.backend_tokenizer, controls)
    for name, number in controls.all.items():
        text = f"a{name} b {name}c"
        place = text.rindex(name)
        tokens = markup.encode(text, [(place, place + len(name))])
        at = tokens.ids == number
        if name != controls.unknown:
            assert tokens.ends[at].tolist() == [place + len(name)]
        assert number in tokens.ids
        assert tokens.ends[-1] == len(text)


def test_a_withholding_copy_differs_in_nothing_else(tokenizer: Any) -> None:
    backend = tokenizer.backend_tokenizer
    names = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    withholding = withholding_tokenizer(backend, names)
    for name in names:
        assert withholding.backend.token_to_id(withholding.name(name)) == backend.token_to_id(name)
    text = "Plain text, naïve  café\r\n🙂 x = 1"
    assert (
        withholding.backend.encode(text).ids == private_tokenizer(backend).backend.encode(text).ids
    )


def test_a_unigram_model_that_lists_its_control_tokens_as_pieces_is_kept_from_them() -> None:
    vocab = [("<unk>", 0.0), ("</s>", 0.0), *((c, -2.0) for c in "abc</s> ▁")]
    backend = Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=False))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.add_tokens([AddedToken(t, special=True, normalized=False) for t in ("<unk>", "</s>")])
    controls = ControlTokens.of(backend, "", "", "<unk>")
    tokens = MarkupTokenizer(backend, controls).encode("ab</s>c</s>", [(7, 11)])
    assert tokens.ids.tolist().count(1) == 1
    assert tokens.ids[-1] == 1


def test_text_the_vocabulary_cannot_spell_is_no_forgery() -> None:
    backend = Tokenizer(models.WordLevel({"<unk>": 0, "known": 1}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_tokens([AddedToken("<unk>", special=True, normalized=False)])
    markup = MarkupTokenizer(backend, ControlTokens.of(backend, "", "", "<unk>"))
    assert markup.encode("known foreign", []).ids.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("family", "unknown"), [("smollm2", "<|endoftext|>"), ("mistral", "<unk>")]
)
def test_the_name_of_the_unknown_token_is_withheld_like_any_other(
    tokenizers: Tokenizers, family: str, unknown: str
) -> None:
    tokenizer = tokenizers(family)
    assert tokenizer.unk_token == unknown
    markup = MarkupTokenizer(tokenizer.backend_tokenizer, controls_of(tokenizer))
    text = f"a{unknown} b {unknown}"
    place = (len(text) - len(unknown), len(text))
    number = tokenizer.unk_token_id
    assert markup.encode(text, []).ids.tolist().count(number) == 0
    assert markup.encode(text, [place]).ids.tolist().count(number) == 1


def test_several_threads_get_what_one_gets(tokenizers: Tokenizers) -> None:
    tokenizer = tokenizers("qwen")
    markup = MarkupTokenizer(tokenizer.backend_tokenizer, controls_of(tokenizer))
    words = ["the agent", "reads.", "So it answers", "<|im_end|>", "again!", "The passages"]
    texts = [" ".join(random.Random(i).choices(words, k=60)) for i in range(20)]
    expected = [
        MarkupTokenizer(tokenizer.backend_tokenizer, controls_of(tokenizer)).encode(t, []).ids
        for t in texts[:3]
    ]
    results: list[list[list[int]]] = []

    def work() -> None:
        results.append([markup.encode(text, []).ids.tolist() for text in texts])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [ids.tolist() for ids in expected] == results[0][:3]
    assert all(result == results[0] for result in results)
    assert len(results) == 4


def test_a_saved_tokenizer_is_loaded(tokenizers: Tokenizers, tmp_path: Path) -> None:
    tokenizer = tokenizers("qwen")
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    text = "<|im_start|>user\nthe agent"
    assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert loaded.chat_template == tokenizer.chat_template


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"no tokenizer folder at .*gone"):
        load_tokenizer(tmp_path / "gone")


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{not json", encoding="utf-8")
    with pytest.raises(TokenizerError, match="cannot load a tokenizer from"):
        load_tokenizer(tmp_path)
