"""Rules of a schema: those a grammar keeps, those it cannot and the log names."""

from __future__ import annotations

import asyncio
import json
import logging
from threading import Event
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from cacheslide_agents.backend import GenerationRequest, Sampling
from cacheslide_agents.errors import RequestError
from cacheslide_agents.sampling import Grammar
from torch_cacheslide import TorchBackend
from torch_cacheslide.grammar import Constraint, Grammars

pytest.importorskip("xgrammar", reason="the package xgrammar is not installed")


@pytest.fixture
def grammars(tokenizers: Any) -> Grammars:
    tokenizer = tokenizers("llama3")
    return Grammars(tokenizer, len(tokenizer), [tokenizer.eos_token_id])


@pytest.fixture
def accepts(tokenizers: Any, grammars: Grammars) -> Any:
    tokenizer = tokenizers("llama3")

    def allowed(grammar: Grammar, text: str) -> bool:
        constraint = grammars.constraint(grammar)
        for token in tokenizer.encode(text, add_special_tokens=False):
            if not constraint.allowed()[token]:
                return False
            constraint.accept(token)
        return bool(constraint.allowed()[tokenizer.eos_token_id])

    return allowed


def schema(**rules: Any) -> Grammar:
    return Grammar("json_schema", json.dumps(rules))


def in_a_tag(grammar: Grammar) -> Grammar:
    content = {"type": "json_schema", "json_schema": json.loads(grammar.source)}
    answer = {"type": "tag", "begin": "<a>", "content": content, "end": "</a>"}
    return Grammar("structural_tag", json.dumps({"type": "structural_tag", "format": answer}))


@pytest.mark.parametrize("bounds", [(0, 3), (2, 2), (2, None), (0, 128), (100, 2000)], ids=str)
def test_a_string_is_as_long_as_its_bounds_say(accepts: Any, bounds: Any) -> None:
    least, most = bounds
    rules = {"minLength": least} | ({} if most is None else {"maxLength": most})
    grammar = schema(type="string", **rules)
    for length in {0, 1, least, max(0, least - 1), most or 50, (most or 50) + 1}:
        text = json.dumps("é" * length, ensure_ascii=False)
        fits = least <= length and (most is None or length <= most)
        assert accepts(grammar, text) == fits, length
        assert accepts(in_a_tag(grammar), f"<a>{text}</a>") == fits, length


@pytest.mark.parametrize("character", ["\t", "\0", "\x1f", "\n", "\r", '"', "\\"])
def test_a_bounded_string_holds_nothing_that_json_escapes(accepts: Any, character: str) -> None:
    grammar = schema(type="string", maxLength=9)
    assert not accepts(grammar, f'"{character}"')
    assert not accepts(in_a_tag(grammar), f'<a>"{character}"</a>')


def test_bounds_cost_no_more_states_however_wide_they_are(grammars: Grammars) -> None:
    many = {f"p{at}": {"type": "string", "maxLength": 10**5 + at} for at in range(20)}
    source = grammars._ready(schema(type="object", properties=many, required=list(many)))
    assert len(source) < 20_000


@pytest.mark.parametrize(
    ("rules", "named"),
    [
        ({"type": "string", "pattern": "^(?!admin).*$"}, "#: pattern"),
        ({"type": "string", "pattern": "^(?=a)b$"}, "#: pattern"),
        ({"type": "string", "pattern": "^(?<!x)b$"}, "#: pattern"),
        ({"type": "string", "pattern": "(?<=x)b"}, "#: pattern"),
        ({"type": "string", "pattern": "(?i)b"}, "#: pattern"),
        ({"type": "string", "pattern": r"^\\(?=a)b$"}, "#: pattern"),
        ({"type": "string", "pattern": r"^[\]](?!a)b$"}, "#: pattern"),
        ({"type": "string", "pattern": r"^[^](?!a)b]$"}, "#: pattern"),
        ({"type": "string", "pattern": '^"$'}, "#: pattern"),
        ({"type": "string", "pattern": r"^\\\\$"}, "#: pattern"),
        ({"type": "string", "pattern": r"^\na$"}, "#: pattern"),
        ({"type": "string", "pattern": "^\na$"}, "#: pattern"),
        ({"type": "string", "pattern": r"^[\tb]$"}, "#: pattern"),
        ({"type": "string", "pattern": r"^\x22$"}, "#: pattern"),
        ({"type": "string", "pattern": r"^\u005Ca$"}, "#: pattern"),
        ({"type": "string", "pattern": r"^\u{22}$"}, "#: pattern"),
        ({"type": "string", "pattern": r"^\cJ$"}, "#: pattern"),
        ({"type": "string", "pattern": "^[^]$"}, "#: pattern"),
        ({"type": "array", "unevaluatedItems": {"minimum": 3}}, "#/unevaluatedItems: minimum"),
        ({"$ref": "http://x/y"}, "#: $ref"),
        ({"anyOf": [{"$ref": "other.json#/a"}]}, "#/anyOf/0: $ref"),
        ({"maxLength": 3}, "#: maxLength"),
        ({"enum": ["abcd"], "maxLength": 3}, "#: maxLength"),
        ({"type": "integer", "pattern": "a"}, "#: pattern"),
        ({"minimum": 3}, "#: minimum"),
        ({"type": "object", "patternProperties": {"^(?!a)b": {}}}, "patternProperties ^(?!a)b"),
        ({"type": "string", "pattern": "^a+$", "maxLength": 3}, "#: maxLength"),
    ],
    ids=str,
)
def test_a_rule_that_is_dropped_is_named_in_the_log(
    rules: Any, named: str, grammars: Grammars, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        grammars.constraint(schema(**rules))
    (record,) = caplog.records
    assert record.getMessage() == (
        f"a grammar does not enforce {named}: check the answer"
        if named.startswith("#")
        else f"a grammar does not enforce #: {named}: check the answer"
    )


def test_rules_that_are_kept_are_not_named(accepts: Any, caplog: pytest.LogCaptureFixture) -> None:
    names = schema(
        type="object", propertyNames={"maxLength": 2}, additionalProperties={"type": "integer"}
    )
    assert accepts(names, '{"ab": 1}') and not accepts(names, '{"abc": 1}')
    assert not accepts(schema(type=["string", "null"], maxLength=2), '"abc"')
    assert accepts(schema(type="string", pattern="^(?:a|(?<name>b))$"), '"b"')
    assert not caplog.records


@pytest.mark.parametrize(
    ("pattern", "right", "wrong"),
    [
        (r"^\(?\d{3}\)?-\d{4}$", ["(555)-1234", "555-1234"], ["55-1234", "((555)-1234", "a"]),
        (r"^\+?\(?[0-9]+$", ["12", "+(12"], ["+(", "++1", "a"]),
        (r"^[(?]x$", ["(x", "?x"], ["x", "=x"]),
        (r"^[\](?=]x$", ["]x", "(x", "=x"], ["x", "ax"]),
        (r"^\[(?:a|b)\]$", ["[a]", "[b]"], ["a", "[?]"]),
        (r"^\x41\u0042$", ["AB"], ["A", "x41"]),
        ('^[^"]$', ["a", "'"], ["", "ab"]),
        (r'^(?:a|[^"\\\n])+$', ["ab"], [""]),
        (r"^\d\D$", ["1a"], ["a1", "11"]),
    ],
)
def test_a_pattern_is_kept_although_it_escapes_what_others_group_by(
    accepts: Any,
    caplog: pytest.LogCaptureFixture,
    pattern: str,
    right: list[str],
    wrong: list[str],
) -> None:
    text = schema(type="string", pattern=pattern)
    rules = {"additionalProperties": False, "minProperties": 1}
    named = schema(type="object", patternProperties={pattern: {"type": "integer"}}, **rules)
    for each in [*right, *wrong]:
        assert accepts(text, f'"{each}"') == (each in right), each
        assert accepts(named, f'{{"{each}": 1}}') == (each in right), each
    for outside in ('"', "\\", "\n"):
        assert not accepts(text, f'"{outside}"')
    assert not caplog.records


@pytest.mark.parametrize(
    "rules",
    [
        {},
        {"minItems": 1},
        {"maxItems": 1},
        {"minItems": 1, "maxItems": 2},
        {"type": ["array", "null"], "minItems": 2},
        {"prefixItems": [], "maxItems": 2},
        {"prefixItems": [{"type": "integer"}], "minItems": 2},
        {"prefixItems": [{"type": "integer"}], "maxItems": 2},
        {"prefixItems": [{"type": "integer"}], "minItems": 1, "maxItems": 1},
        {"prefixItems": [{"type": "integer"}], "unevaluatedItems": {"type": "string"}},
        {"unevaluatedItems": False, "maxItems": 2},
        {"items": False, "maxItems": 2},
    ],
    ids=str,
)
def test_an_array_is_as_long_as_its_bounds_say_whatever_its_items(
    accepts: Any, rules: dict[str, Any]
) -> None:
    rules = {"type": "array", **rules}
    validator = Draft202012Validator(rules)
    for value in ([], [1], [1, "a"], [1, [2], {"b": None}], ["a"]):
        assert accepts(schema(**rules), json.dumps(value)) == validator.is_valid(value), value


def test_a_tuple_without_bounds_ends_with_its_last_item(accepts: Any) -> None:
    pair = schema(prefixItems=[{"type": "integer"}, {"type": "string"}])
    assert accepts(pair, '[1, "a"]') and not accepts(pair, '[1, "a", 2]')


def test_an_enum_that_would_take_minutes_is_refused_by_its_place(grammars: Grammars) -> None:
    long = {"type": "object", "properties": {"t": {"enum": [f"{n:020}" for n in range(9000)]}}}
    with pytest.raises(RequestError, match="#/properties/t: enum of 9000 values has"):
        grammars.constraint(schema(**long))
    with pytest.raises(RequestError, match="characters that JSON escapes"):
        grammars.constraint(schema(type="object", patternProperties={'a"b': {}}))
    grammars.constraint(schema(enum=[f"value-{n}" for n in range(2000)]))


def test_nobody_waits_for_the_grammar_of_another(
    tiny_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = TorchBackend(tiny_model, device="cpu")
    begun, go_on = Event(), Event()
    start = backend._writer.start

    def slow(request: GenerationRequest) -> Constraint | None:
        begun.set()
        assert go_on.wait(60)
        return start(request)

    monkeypatch.setattr(backend._writer, "start", slow)
    constrained = GenerationRequest(
        [3, 4], sampling=Sampling(max_tokens=2), grammar=Grammar("regex", "a")
    )

    async def ask(request: GenerationRequest) -> int:
        return len([chunk async for chunk in backend.agenerate(request)])

    async def both() -> None:
        asked = asyncio.create_task(ask(constrained))
        await asyncio.to_thread(begun.wait, 60)
        assert await ask(GenerationRequest([3, 4], sampling=Sampling(max_tokens=2)))
        assert not asked.done()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(ask(constrained), 0.01)
        go_on.set()
        assert await asked

    try:
        asyncio.run(both())
    finally:
        go_on.set()
        backend.close()
