"""Grammars of tool calls: what they let through, by the automata that the torch backend uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cacheslide_agents.errors import RequestError
from cacheslide_agents.prompt.calls import HERMES, LLAMA3, MISTRAL, CallFormat, Wish, call_grammar
from cacheslide_agents.prompt.chat import ChatEncoder

xgrammar = pytest.importorskip("xgrammar", reason="the package xgrammar is not installed")

Allows = Callable[[CallFormat, Wish, str], bool]
Accepts = Callable[[str, str], bool]
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
    assert ChatEncoder(tokenizers(family)).call_format is style


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
