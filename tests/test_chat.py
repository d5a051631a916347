"""Rendering and tokenising a chunked conversation for several kinds of tokenizers."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from cacheslide_agents.chunks import Chunk, ChunkedPrompt, EncodedPrompt, Message, Role
from cacheslide_agents.errors import PromptError, TokenizerError
from cacheslide_agents.prompt.chat import ChatEncoder

Tokenizers = Callable[[str], Any]


def prompt_of(*messages: tuple[str, list[str]], role: Role = Role.RECOMPUTE) -> ChunkedPrompt:
    """Chunks are named `<message>.<chunk>`."""
    return ChunkedPrompt(
        tuple(
            Message(name, tuple(Chunk(f"{i}.{j}", text, role) for j, text in enumerate(texts)))
            for i, (name, texts) in enumerate(messages)
        )
    )


def plain(prompt: ChunkedPrompt) -> list[dict[str, str]]:
    return [{"role": m.role, "content": m.content} for m in prompt.messages]


def reference_ids(tokenizer: Any, prompt: ChunkedPrompt) -> list[int]:
    encoded = tokenizer.apply_chat_template(plain(prompt), add_generation_prompt=True)
    ids: list[int] = encoded["input_ids"]
    return ids


def pieces(tokenizer: Any, encoded: EncodedPrompt) -> dict[str, str]:
    """What each span says, read from the offsets that transformers gives for the same text."""
    offsets = tokenizer(encoded.text, add_special_tokens=False, return_offsets_mapping=True)
    ends = [end for _, end in offsets["offset_mapping"]]
    cuts = [0, *(ends[span.stop - 1] if span.stop else 0 for span in encoded.spans)]
    return {
        span.id: encoded.text[start:stop]
        for span, start, stop in zip(encoded.spans, cuts, cuts[1:], strict=False)
    }


CONVERSATION = prompt_of(
    ("system", ["Be brief.\n", "Facts: one."]),
    ("user", ["Here is a document.\n", "Question: why?"]),
    ("assistant", ["Because."]),
    ("user", ["And then?"]),
)


def test_ids_equal_those_of_transformers_and_spans_partition_them(tokenizer: Any) -> None:
    encoded = ChatEncoder(tokenizer).encode(CONVERSATION)
    assert list(encoded.ids) == reference_ids(tokenizer, CONVERSATION)
    borders = [(span.start, span.stop) for span in encoded.spans]
    assert borders[0][0] == 0
    assert borders[-1][1] == len(encoded.ids)
    assert all(a[1] == b[0] for a, b in pairwise(borders))
    ids = [span.id for span in encoded.spans]
    assert ids == ["0.0", "0.1", "1.0", "1.1", "2.0", "3.0", "generation-prompt"]
    assert [span.digest for span in encoded.spans[:-1]] == [
        chunk.digest for chunk in CONVERSATION.chunks()
    ]


def test_markup_goes_with_the_chunk_that_follows_it(tokenizers: Tokenizers) -> None:
    tokenizer = tokenizers("llama3")
    encoded = ChatEncoder(tokenizer).encode(CONVERSATION)
    head, turn = "<|start_header_id|>{}<|end_header_id|>\n\n", "<|eot_id|>"
    assert pieces(tokenizer, encoded) == {
        "0.0": "<|begin_of_text|>" + head.format("system") + "Be brief.\n",
        "0.1": "Facts: one.",
        "1.0": turn + head.format("user") + "Here is a document.\n",
        "1.1": "Question: why?",
        "2.0": turn + head.format("assistant") + "Because.",
        "3.0": turn + head.format("user") + "And then?",
        "generation-prompt": turn + head.format("assistant"),
    }


def test_a_token_across_a_seam_belongs_to_the_later_chunk(tokenizers: Tokenizers) -> None:
    tokenizer = tokenizers("llama3")
    encoder = ChatEncoder(tokenizer)
    text = "the agent reads the passages"
    whole = encoder.encode(prompt_of(("user", [text])))
    tokens = tokenizer.convert_ids_to_tokens(whole.ids)
    longest = max(tokens, key=lambda token: len(token) if token[1:] in text else 0)
    seam = text.index(longest[1:]) + 1
    cut = encoder.encode(prompt_of(("user", [text[:seam], text[seam:]])))
    assert cut.ids == whole.ids
    assert len(longest) > 2
    assert tokens[cut.spans[1].start] == longest


def test_empty_chunks_are_empty_spans(tokenizer: Any) -> None:
    prompt = prompt_of(("system", ["", "Rules.", ""]), ("user", ["", ""]), ("assistant", [""]))
    prompt = ChunkedPrompt(
        (*prompt.messages, Message("user", (Chunk("q", "Why?"), Chunk("e", ""))))
    )
    encoded = ChatEncoder(tokenizer).encode(prompt)
    assert list(encoded.ids) == reference_ids(tokenizer, prompt)
    lengths = {span.id: len(span) for span in encoded.spans}
    assert {name for name, length in lengths.items() if length} == {"0.1", "q", "generation-prompt"}
    assert list(lengths) == [
        "0.0",
        "0.1",
        "0.2",
        "1.0",
        "1.1",
        "2.0",
        "q",
        "e",
        "generation-prompt",
    ]


def test_white_space_at_the_edge_of_a_message_keeps_its_chunk(tokenizers: Tokenizers) -> None:
    tokenizer = tokenizers("qwen")
    prompt = prompt_of(("user", ["\t \t", "text", "\t\t", "\n "]), ("user", ["next"]))
    encoded = ChatEncoder(tokenizer).encode(prompt)
    assert pieces(tokenizer, encoded) == {
        "0.0": "<|im_start|>user\n\t \t",
        "0.1": "text",
        "0.2": "\t\t",
        "0.3": "\n ",
        "1.0": "<|im_end|>\n<|im_start|>user\nnext",
        "generation-prompt": "<|im_end|>\n<|im_start|>assistant\n",
    }


def test_text_that_a_template_trims_leaves_no_trace(tokenizers: Tokenizers) -> None:
    tokenizer = tokenizers("llama3")
    prompt = prompt_of(("user", [" \n", "text", "\t\n"]))
    encoded = ChatEncoder(tokenizer).encode(prompt)
    assert list(encoded.ids) == reference_ids(tokenizer, prompt)
    found = pieces(tokenizer, encoded)
    assert found["0.0"] == found["0.2"] == ""
    assert found["0.1"].endswith("\n\ntext")


def test_chunks_stand_in_the_order_in_which_they_came_out(tokenizers: Tokenizers) -> None:
    moving = (
        "{% for m in messages if m.role != 'system' %}<|USER|>{{ m.content }}{% endfor %}"
        "<|SYSTEM|>{{ messages[0].content }}<|ASSISTANT|>"
    )
    encoder = ChatEncoder(tokenizers("neox"), chat_template=moving)
    encoded = encoder.encode(prompt_of(("system", ["rules"]), ("user", ["question"])))
    assert [span.id for span in encoded.spans] == ["1.0", "0.0", "generation-prompt"]
    assert encoded.text == "<|USER|>question<|SYSTEM|>rules<|ASSISTANT|>"


def test_thinking_that_is_stripped_leaves_an_empty_chunk(tokenizers: Tokenizers) -> None:
    tokenizer = tokenizers("qwen")
    turns = ("assistant", ["<think>long ", "thought", "</think>\n\nAnswer."])
    prompt = prompt_of(("user", ["Hi"]), turns, ("user", ["More"]))
    encoded = ChatEncoder(tokenizer).encode(prompt)
    assert list(encoded.ids) == reference_ids(tokenizer, prompt)
    assert "thought" not in encoded.text
    lengths = {span.id: len(span) for span in encoded.spans}
    assert (lengths["1.0"], lengths["1.1"]) == (0, 0)
    assert pieces(tokenizer, encoded)["1.2"].endswith("assistant\nAnswer.")


def test_where_borders_inside_messages_are_hidden_a_message_is_a_chunk(
    tokenizers: Tokenizers,
) -> None:
    """The template strips white space after the thinking, which is where a border stands."""
    turns = ("assistant", ["<think>thought</think>", "\n\nAnswer."])
    prompt = prompt_of(("user", ["a", "b"]), turns, ("user", ["c"]), role=Role.REUSE)
    encoded = ChatEncoder(tokenizers("qwen")).encode(prompt)
    assert [(span.id, span.role) for span in encoded.spans] == [
        ("0.0..0.1", Role.REUSE),
        ("1.0..1.1", Role.REUSE),
        ("2.0", Role.REUSE),
        ("generation-prompt", Role.RECOMPUTE),
    ]
    edited = prompt_of(("user", ["a", "B"]), turns, ("user", ["c"]), role=Role.REUSE)
    again = ChatEncoder(tokenizers("qwen")).encode(edited)
    same = [a.digest == b.digest for a, b in zip(encoded.spans, again.spans, strict=True)]
    assert same == [False, True, True, True]


def test_where_every_border_is_hidden_the_prompt_is_one_chunk(tokenizers: Tokenizers) -> None:
    counting = "{% for m in messages %}<|USER|>{{ m.content | length }}{% endfor %}"
    encoded = ChatEncoder(tokenizers("neox"), chat_template=counting).encode(CONVERSATION)
    assert [span.id for span in encoded.spans] == ["prompt", "generation-prompt"]
    assert len(encoded.spans[0]) == len(encoded.ids)


def test_without_generation_prompt_the_last_span_is_what_closes_the_turn(
    tokenizers: Tokenizers,
) -> None:
    tokenizer = tokenizers("llama3")
    encoded = ChatEncoder(tokenizer).encode(CONVERSATION, add_generation_prompt=False)
    assert pieces(tokenizer, encoded)["generation-prompt"] == "<|eot_id|>"


def test_an_authors_chunk_may_be_called_generation_prompt(tokenizers: Tokenizers) -> None:
    prompt = ChunkedPrompt((Message("user", (Chunk("generation-prompt", "Hi"),)),))
    encoded = ChatEncoder(tokenizers("llama3")).encode(prompt)
    assert [span.id for span in encoded.spans] == ["generation-prompt", "generation-prompt-2"]


def test_a_tokenizer_without_chat_template_gets_the_plain_one(tokenizers: Tokenizers) -> None:
    tokenizer = tokenizers("mistral")
    saved, tokenizer.chat_template = tokenizer.chat_template, None
    try:
        encoded = ChatEncoder(tokenizer).encode(CONVERSATION)
    finally:
        tokenizer.chat_template = saved
    assert encoded.text == (
        "System: Be brief.\nFacts: one.\n\nUser: Here is a document.\nQuestion: why?\n\n"
        "Assistant: Because.\n\nUser: And then?\n\nAssistant:"
    )
    assert list(encoded.ids) == tokenizer(encoded.text, add_special_tokens=False)["input_ids"]


def test_a_value_cannot_complete_a_control_token_with_the_markup_around_it(
    tokenizers: Tokenizers,
) -> None:
    tokenizer = tokenizers("mistral")
    bracketed = "{% for m in messages %}[{{ m.content }}]{{ eos_token }}{% endfor %}"
    encoded = ChatEncoder(tokenizer, chat_template=bracketed).encode(prompt_of(("user", ["INST"])))
    assert encoded.text == "[INST]</s>"
    assert encoded.ids.count(tokenizer.convert_tokens_to_ids("[INST]")) == 0
    assert encoded.ids.count(tokenizer.convert_tokens_to_ids("</s>")) == 1


@pytest.mark.parametrize("drops", ["{{ raise_exception('no system role') }}", ""])
def test_system_text_goes_to_the_first_user_message_where_there_is_no_system_role(
    tokenizers: Tokenizers, drops: str
) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'system' %}"
        + drops
        + "{% else %}<|USER|>{{ m.content }}{% endif %}{% endfor %}"
    )
    encoder = ChatEncoder(tokenizers("neox"), chat_template=template)
    encoded = encoder.encode(prompt_of(("system", ["Be ", "brief."]), ("user", ["Why?"])))
    assert encoded.text == "<|USER|>Be brief.\n\nWhy?"
    assert [span.id for span in encoded.spans] == ["0.0", "0.1", "1.0", "generation-prompt"]
    assert encoder.encode(prompt_of(("system", []), ("user", ["Why?"]))).text == "<|USER|>Why?"


def test_variables_reach_the_chat_template(tokenizers: Tokenizers) -> None:
    template = "{{ date }}: {% for m in messages %}{{ m.content }}{% endfor %}"
    encoder = ChatEncoder(tokenizers("neox"), chat_template=template, variables={"date": "1 May"})
    assert encoder.encode(prompt_of(("user", ["Hi"]))).text == "1 May: Hi"


def test_a_thousand_chunks_and_a_huge_one(tokenizers: Tokenizers) -> None:
    tokenizer = tokenizers("llama3")
    texts = [f"Item {i} is red. " for i in range(1000)]
    prompt = prompt_of(("user", texts), ("user", ["all of them, as it were. " * 2000]))
    encoded = ChatEncoder(tokenizer).encode(prompt)
    assert list(encoded.ids) == reference_ids(tokenizer, prompt)
    assert len(encoded.spans) == 1002
    found = pieces(tokenizer, encoded)
    assert (found["0.500"] + found["0.501"]).strip() == "Item 500 is red. Item 501 is red."


def test_a_refusing_chat_template_is_a_prompt_error(tokenizers: Tokenizers) -> None:
    prompt = prompt_of(("user", ["a"]), ("user", ["b"]))
    with pytest.raises(PromptError, match="refuses the conversation: user and assistant must take"):
        ChatEncoder(tokenizers("mistral")).encode(prompt)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (ChunkedPrompt((), "qa"), "the prompt for task 'qa' has no messages"),
        (prompt_of(("narrator", ["x"])), "unknown message role 'narrator'"),
        (prompt_of(("user", ["ab\ud800"])), r"chunk '0\.0' is not Unicode text: .* at character 2"),
    ],
)
def test_a_bad_prompt_is_a_prompt_error(
    tokenizers: Tokenizers, prompt: ChunkedPrompt, message: str
) -> None:
    with pytest.raises(PromptError, match=message):
        ChatEncoder(tokenizers("llama3")).encode(prompt)


def test_a_slow_tokenizer_is_refused() -> None:
    with pytest.raises(TokenizerError, match="object is not a fast tokenizer"):
        ChatEncoder(object())
