"""Grammars of tool calls: what they let through, by the automata that the torch backend uses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from cacheslide_agents.errors import RequestError
from cacheslide_agents.prompt.calls import (
    CALL_TOKEN,
    HERMES,
    LLAMA3,
    MISTRAL,
    CallFormat,
    Wish,
    call_grammar,
)
from cacheslide_agents.prompt.chat import ChatEncoder
from cacheslide_agents.sampling import Grammar
from langchain_cacheslide.toolcalls import CallReader
from torch_cacheslide.grammar import Grammars

xgrammar = pytest.importorskip("xgrammar", reason="the package xgrammar is not installed")

Allows = Callable[[CallFormat, Wish, str], bool]
Accepts = Callable[[str, str], bool]
Ends = Callable[[Grammar, str], bool]
NUMBER = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": NUMBER}},
    {"type": "function", "function": {"name": "ping"}},
]
F = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": {"x": 3}}\n</tool_call>',
    "mistral": '[{"name": "f", "arguments": {"x": 3}}]',
    "llama3": '{"name": "f", "parameters": {"x": 3}}',
}
TWO = {
    "hermes": F["hermes"] + '\n<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>',
    "mistral": '[{"name": "f", "arguments": {"x": 3}}, {"name": "ping", "arguments": {}}]',
}
STYLES = [HERMES, MISTRAL, LLAMA3]
every_style = pytest.mark.parametrize("style", STYLES, ids=lambda style: style.name)


@pytest.fixture(scope="module")
def accepts(tokenizers: Callable[[str], Any]) -> Accepts:
    """Whether an answer under a structural tag may be that text, to its end."""
    tokenizer = tokenizers("qwen")
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=len(tokenizer))
    compiler = xgrammar.GrammarCompiler(info)

    def check(source: str, text: str) -> bool:
        matcher = xgrammar.GrammarMatcher(compiler.compile_structural_tag(source))
        return bool(matcher.accept_string(text) and matcher.accept_token(tokenizer.eos_token_id))

    return check


@pytest.fixture(scope="module")
def allows(accepts: Accepts) -> Allows:
    return lambda style, wish, text: accepts(call_grammar(style, TOOLS, wish).source, text)


@every_style
def test_required_lets_through_calls_and_nothing_else(allows: Allows, style: CallFormat) -> None:
    wish = Wish("required")
    assert allows(style, wish, F[style.name])
    assert not allows(style, wish, "It is 3.")
    assert not allows(style, wish, "")
    assert not allows(style, wish, F[style.name].replace('"f"', '"g"'))
    assert not allows(style, wish, F[style.name].replace("3", '"3"'))
    assert not allows(style, wish, F[style.name].replace('"x": 3', ""))
    assert not allows(style, wish, F[style.name].replace('"x": 3', '"x": 3, "y": 4'))


@pytest.mark.parametrize("style", [HERMES, MISTRAL], ids=lambda style: style.name)
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_several_calls_are_let_through_unless_they_are_not_wanted(
    allows: Allows, style: CallFormat, choice: str
) -> None:
    assert allows(style, Wish(choice), TWO[style.name])
    assert not allows(style, Wish(choice, parallel=False), TWO[style.name])
    assert allows(style, Wish(choice, parallel=False), F[style.name])


def test_llama_3_makes_one_call_an_answer(allows: Allows) -> None:
    assert not allows(LLAMA3, Wish("required"), F["llama3"] + "\n" + F["llama3"])


@every_style
def test_auto_lets_through_text_and_valid_calls(allows: Allows, style: CallFormat) -> None:
    wish = Wish("auto")
    for text in ("It is 3.", "", F[style.name], f"I look.\n{F[style.name]}"):
        assert allows(style, wish, text)
    assert not allows(style, wish, F[style.name].replace('"f"', '"g"'))


@every_style
def test_named_function_is_the_only_one_let_through(allows: Allows, style: CallFormat) -> None:
    assert allows(style, Wish("name:f"), F[style.name])
    assert not allows(style, Wish("name:ping"), F[style.name])


@every_style
def test_none_lets_through_text_and_no_call(allows: Allows, style: CallFormat) -> None:
    assert allows(style, Wish("none"), "It is 3.")
    assert not allows(style, Wish("none"), F[style.name])


@every_style
def test_schema_and_tools_let_through_either(allows: Allows, style: CallFormat) -> None:
    wish = Wish("auto", schema={"type": "object", "properties": {"y": {"type": "boolean"}}})
    assert allows(style, wish, '{"y": true}')
    assert allows(style, wish, F[style.name])
    assert not allows(style, wish, "It is 3.")


def test_function_without_parameters_takes_no_arguments(allows: Allows) -> None:
    with_arguments = F["hermes"].replace('"f"', '"ping"')
    assert allows(HERMES, Wish("name:ping"), with_arguments.replace('"x": 3', ""))
    assert not allows(HERMES, Wish("name:ping"), with_arguments)


def test_recursive_schema_lets_through_nested_arguments(accepts: Accepts) -> None:
    tree = {
        "type": "object",
        "properties": {"children": {"type": "array", "items": {"$ref": "#"}}},
    }
    tools = [{"type": "function", "function": {"name": "f", "parameters": tree}}]
    source = call_grammar(HERMES, tools, Wish("required")).source
    text = F["hermes"].replace('{"x": 3}', '{"children": [{"children": [{}]}, {}]}')
    assert accepts(source, text)
    assert not accepts(source, text.replace("[{}]", "[3]"))


@pytest.fixture(scope="module")
def mistral(tokenizers: Callable[[str], Any]) -> Any:
    return tokenizers("mistral")


def ids_in_an_answer(mistral: Any, text: str) -> list[int]:
    """Its tokenizer puts a space before what it takes for the beginning of a text."""
    ids: list[int] = mistral.encode(CALL_TOKEN + text, add_special_tokens=False)
    return ids[1:]


@pytest.fixture(scope="module")
def ends(mistral: Any) -> Ends:
    """Whether an answer of a Mistral model may be these tokens, to its end."""
    grammars = Grammars(mistral, len(mistral), [mistral.eos_token_id])

    def check(grammar: Grammar, text: str) -> bool:
        constraint = grammars.constraint(grammar)
        for token in [*ids_in_an_answer(mistral, text), mistral.eos_token_id]:
            if not constraint.allowed()[token]:
                return False
            constraint.accept(token)
            constraint = constraint.fork()
        return True

    return check


@pytest.mark.parametrize("choice", ["auto", "required", "name:f"])
@pytest.mark.parametrize("begin", ["", CALL_TOKEN, f"{CALL_TOKEN} "])
def test_mistral_may_begin_calls_with_the_token_it_was_taught(
    mistral: Any, ends: Ends, choice: str, begin: str
) -> None:
    style = ChatEncoder(mistral).call_format
    assert style == replace(MISTRAL, opening=mistral.convert_tokens_to_ids(CALL_TOKEN))
    grammar = call_grammar(style, TOOLS, Wish(choice))
    assert ends(grammar, begin + F["mistral"])
    assert not ends(grammar, begin + F["mistral"].replace('"f"', '"g"'))
    assert not ends(grammar, begin + F["mistral"].replace("3", '"3"'))
    ids = ids_in_an_answer(mistral, begin + F["mistral"])
    reader = CallReader(style)
    said, calls = reader.feed(mistral.decode(ids, skip_special_tokens=True))
    assert said + reader.finish()[0] == ""
    assert [(call.name, call.arguments) for call in calls] == [("f", '{"x": 3}')]


@pytest.mark.parametrize(
    "text",
    [
        f"I look. {CALL_TOKEN}",
        f"{CALL_TOKEN}{CALL_TOKEN}",
        f'[{{"na{CALL_TOKEN}me": "g", "arguments": {{}}}}]',
        "[INST] It is 3.",
    ],
)
def test_token_that_begins_calls_stands_nowhere_else(mistral: Any, ends: Ends, text: str) -> None:
    style = ChatEncoder(mistral).call_format
    assert not ends(call_grammar(style, TOOLS, Wish("auto")), text)


def test_token_that_begins_calls_is_no_part_of_other_answers(mistral: Any, ends: Ends) -> None:
    style = ChatEncoder(mistral).call_format
    assert not ends(call_grammar(style, TOOLS, Wish("required")), f"{CALL_TOKEN} It is 3.")
    assert ends(call_grammar(style, TOOLS, Wish("none")), "It is 3.")
    assert not ends(call_grammar(style, TOOLS, Wish("none")), f"{CALL_TOKEN} It is 3.")
    strings = Grammar("json_schema", '{"type": "string"}')
    assert ends(strings, '"a"')
    for text in (f'{CALL_TOKEN}"a"', f'"a{CALL_TOKEN}"'):
        assert not ends(strings, text)


def test_unknown_function_is_refused_by_name() -> None:
    with pytest.raises(RequestError, match="'g' names no bound tool; known: f, ping"):
        call_grammar(HERMES, TOOLS, Wish("name:g"))


@pytest.mark.parametrize(
    ("family", "style"),
    [("qwen", HERMES), ("mistral", MISTRAL), ("smollm2", HERMES), ("neox", HERMES)],
)
def test_format_of_calls_is_found_in_what_the_chat_template_renders(
    tokenizers: Callable[[str], Any], family: str, style: CallFormat
) -> None:
    token = tokenizers(family).get_added_vocab().get(CALL_TOKEN)
    assert ChatEncoder(tokenizers(family)).call_format == replace(style, opening=token)


def test_llama_3s_own_format_is_found_and_unknown_ones_are_replaced_by_our_text(
    tokenizers: Callable[[str], Any],
) -> None:
    shown = (
        "{{% for m in messages %}}<|start_header_id|>{{{{ m.role }}}}<|end_header_id|>"
        "{{{{ m.content }}}}"
        "{{% if tools and loop.first %}}{{{{ tools | tojson }}}}{{% endif %}}"
        "{{% for c in m.tool_calls or [] %}}{call}{{% endfor %}}<|eot_id|>{{% endfor %}}"
    )
    name, arguments = "{{ c.function.name }}", "{{ c.function.arguments | tojson }}"
    calls = {
        "llama3": f'{{"name": "{name}", "parameters": {arguments}}}',
        "xml": f"<f={name}>{arguments}</f>",
    }
    found = {
        name: ChatEncoder(tokenizers("llama3"), chat_template=shown.format(call=call))
        for name, call in calls.items()
    }
    assert found["llama3"].call_format is LLAMA3
    assert found["llama3"].knows_tools
    assert found["xml"].call_format is HERMES
    assert not found["xml"].knows_tools
