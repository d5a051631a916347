"""Properties of encoding that hold for every tokenizer and whatever the values contain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheslide_agents.chunks import Chunk, ChunkedPrompt, EncodedPrompt, Message
from cacheslide_agents.prompt.chat import ChatEncoder

SNIPPETS = st.sampled_from(
    [
        "",
        " ",
        "\n",
        "\r\n\r\n",
        "\t \n ",
        "\u00a0",
        "\u2028",
        "e\u0301",
        "👩\u200d🚀",
        "🙂",
        "日本語",
        "\u017f\u017f's",
        "the agent answers. The next one reads",
        "a  b   c",
        "==========",
        "12,850.5",
        "don't",
        "▁▁",
        "<|im_",
        "end|>",
        "</",
        "s>",
        "[INST",
        "\x00",
        "ﬁ",
    ]
)
TEXT = st.lists(st.one_of(SNIPPETS, st.text(max_size=8)), max_size=6).map("".join)
CHUNKS = st.lists(TEXT, max_size=4)
CONTROL = (
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<s>",
    "</s>",
    "<unk>",
    "[INST]",
    "[/INST]",
    "[TOOL_CALLS]",
    "[TOOL_RESULTS]",
    "<|SYSTEM|>",
    "<|USER|>",
    "<|ASSISTANT|>",
    "<|system|>",
    "<|user|>",
    "<|end|>",
    "</tool_response>",
    "<tool_call>",
)
HOSTILE = st.lists(st.one_of(st.sampled_from(CONTROL), SNIPPETS), max_size=6).map("".join)


@st.composite
def conversations(draw: st.DrawFn, text: st.SearchStrategy[str] = TEXT) -> ChunkedPrompt:
    """Turns by turns, a system message now and then; ids tell message and chunk."""
    roles = ["user", "assistant"] * draw(st.integers(0, 2)) + ["user"]
    if draw(st.booleans()):
        roles.insert(0, "system")
    messages = []
    for i, role in enumerate(roles):
        texts = draw(st.lists(text, max_size=3))
        chunks = tuple(Chunk(f"{i}.{j}", part) for j, part in enumerate(texts))
        messages.append(Message(role, chunks))
    return ChunkedPrompt(tuple(messages))


def marked(prompt: ChunkedPrompt) -> ChunkedPrompt:
    """Every chunk ends with a text that occurs nowhere else."""
    return ChunkedPrompt(
        tuple(
            Message(m.role, tuple(Chunk(c.id, f"{c.text}«{c.id}»") for c in m.chunks))
            for m in prompt.messages
        )
    )


def plain(prompt: ChunkedPrompt) -> list[dict[str, Any]]:
    return [{**m.extra, "role": m.role, "content": m.content} for m in prompt.messages]


def holds_control_text(tokenizer: Any, prompt: ChunkedPrompt) -> bool:
    names = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    return any(name in message.content for message in prompt.messages for name in (*names, "</s>"))


def assert_partition(encoded: EncodedPrompt) -> None:
    borders = [0]
    for span in encoded.spans:
        assert span.start == borders[-1]
        assert span.stop >= span.start
        borders.append(span.stop)
    assert borders[-1] == len(encoded.ids)
    assert len({span.id for span in encoded.spans}) == len(encoded.spans)


@pytest.fixture(scope="module")
def encoder_of() -> Callable[[Any], ChatEncoder]:
    """One encoder a tokenizer, so that its cache is warm and wrong entries would show."""
    made: dict[int, ChatEncoder] = {}
    return lambda tokenizer: made.setdefault(id(tokenizer), ChatEncoder(tokenizer))


@given(data=st.data())
@settings(max_examples=40)
def test_ids_equal_those_of_transformers_for_values_without_control_text(
    tokenizer: Any, encoder_of: Callable[[Any], ChatEncoder], data: st.DataObject
) -> None:
    prompt = data.draw(conversations().filter(lambda p: not holds_control_text(tokenizer, p)))
    encoded = encoder_of(tokenizer).encode(prompt)
    expected = tokenizer.apply_chat_template(plain(prompt), add_generation_prompt=True)
    assert list(encoded.ids) == expected["input_ids"]
    assert_partition(encoded)


@given(data=st.data())
@settings(max_examples=25)
def test_spans_end_where_the_chunks_end(
    tokenizer: Any, encoder_of: Callable[[Any], ChatEncoder], data: st.DataObject
) -> None:
    prompt = marked(data.draw(conversations()))
    encoded = encoder_of(tokenizer).encode(prompt)
    assert_partition(encoded)
    if holds_control_text(tokenizer, prompt):
        return
    offsets = tokenizer(encoded.text, add_special_tokens=False, return_offsets_mapping=True)
    ends = [end for _, end in offsets["offset_mapping"]]
    found = {span.id: span.stop for span in encoded.spans}
    for chunk in prompt.chunks():
        mark = f"«{chunk.id}»"
        stop = encoded.text.index(mark) + len(mark)
        assert found[chunk.id] == sum(end <= stop for end in ends)


@given(data=st.data())
@settings(max_examples=40)
def test_no_value_forges_a_control_token(
    tokenizer: Any, encoder_of: Callable[[Any], ChatEncoder], data: st.DataObject
) -> None:
    """The control ids are those of the same conversation about nothing."""
    prompt = data.draw(conversations(HOSTILE))
    encoder = encoder_of(tokenizer)
    encoded = encoder.encode(prompt)
    assert encoder.encode(prompt) == encoded
    assert_partition(encoded)
    harmless = ChunkedPrompt(
        tuple(Message(m.role, (Chunk(str(i), "x"),)) for i, m in enumerate(prompt.messages))
    )
    expected = tokenizer.apply_chat_template(plain(harmless), add_generation_prompt=True)
    unknown = tokenizer.unk_token_id
    special = {
        number
        for number, token in tokenizer.added_tokens_decoder.items()
        if (token.special or token.content.startswith("<|")) and number != unknown
    }
    assert [i for i in encoded.ids if i in special] == [
        i for i in expected["input_ids"] if i in special
    ]
    assert encoded.text == tokenizer.apply_chat_template(
        plain(prompt), add_generation_prompt=True, tokenize=False
    )


@given(data=st.data())
@settings(max_examples=10)
def test_an_encoder_that_has_seen_much_gives_what_a_new_one_gives(
    tokenizer: Any, encoder_of: Callable[[Any], ChatEncoder], data: st.DataObject
) -> None:
    prompt = data.draw(conversations())
    assert encoder_of(tokenizer).encode(prompt) == ChatEncoder(tokenizer).encode(prompt)
