"""Grammars: what they let through is what independent validators accept, on any tokenizer."""

from __future__ import annotations

import json
import logging
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from jsonschema import Draft202012Validator

from cacheslide_agents.errors import BackendError, RequestError
from cacheslide_agents.sampling import Grammar, GrammarKind
from torch_cacheslide.grammar import MOST_CHARACTERS, Constraint, Grammars
from torch_cacheslide.text import TextStream

SCHEMAS: dict[str, Any] = {
    "object": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "age": {"type": "integer", "minimum": 0, "maximum": 130},
            "score": {"type": "number"},
            "tags": {"type": "array", "items": {"enum": ["a", "b c", 'd"e', "é"]}, "maxItems": 3},
            "nested": {"type": "object", "properties": {"ok": {"type": "boolean"}}},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    },
    "recursive": {
        "$defs": {
            "list": {
                "type": "object",
                "properties": {
                    "value": {"type": ["integer", "null"]},
                    "next": {"anyOf": [{"$ref": "#/$defs/list"}, {"type": "null"}]},
                },
                "required": ["value", "next"],
            }
        },
        "$ref": "#/$defs/list",
    },
    "bounded strings": {
        "type": "array",
        "items": {"type": "string", "minLength": 2, "maxLength": 3},
        "minItems": 1,
        "maxItems": 4,
    },
    "pattern": {"type": "string", "pattern": "^.[^a]\\S{1,2}$"},
    "awkward names": {
        "type": "object",
        "properties": {'a"b\n': {"type": "integer"}, "ü": {"const": {"x": [1, "y"]}}},
        "required": ['a"b\n', "ü", "not declared"],
    },
    "named by pattern": {
        "type": "object",
        "patternProperties": {"^x": {"type": "integer"}},
        "additionalProperties": False,
        "minProperties": 1,
        "maxProperties": 2,
    },
    "string": {"type": "string"},
    "anything": {},
}


def sampled(tokenizer: Any, constraint: Constraint, vocabulary: int, seed: int) -> str | None:
    """The text of a random answer inside the grammar; `None` if it has not ended in 400 tokens."""
    generator = torch.Generator().manual_seed(seed)
    stream, text = TextStream(tokenizer, eos_ids=[tokenizer.eos_token_id]), ""
    for _ in range(400):
        noise = 2 * torch.randn(vocabulary, generator=generator)
        token = int(constraint.apply(noise).argmax())
        constraint.accept(token)
        piece, ended = stream.push(token)
        text += piece
        if ended:
            return text
    return None


@pytest.fixture(scope="module")
def grammars(tokenizers: Any) -> Grammars:
    tokenizer = tokenizers("llama3")
    return Grammars(tokenizer, len(tokenizer) + 7, [tokenizer.eos_token_id])


def samples(
    tokenizer: Any, grammar: Grammar, count: int, grammars: Grammars | None = None
) -> list[str]:
    vocabulary = len(tokenizer) + 7  # models pad their vocabulary
    grammars = grammars or Grammars(tokenizer, vocabulary, [tokenizer.eos_token_id])
    texts = [
        sampled(tokenizer, grammars.constraint(grammar), vocabulary, seed) for seed in range(count)
    ]
    return [text for text in texts if text is not None]


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_finished_answer_validates_against_its_schema(
    tokenizers: Any, grammars: Grammars, name: str
) -> None:
    schema = SCHEMAS[name]
    Draft202012Validator.check_schema(schema)
    texts = samples(tokenizers("llama3"), Grammar("json_schema", json.dumps(schema)), 40, grammars)
    assert len(texts) >= 25
    for text in texts:
        Draft202012Validator(schema).validate(json.loads(text))


@pytest.mark.parametrize("family", ["mistral", "qwen", "neox", "llama3"])
def test_every_tokenizer_family_gives_valid_objects(tokenizers: Any, family: str) -> None:
    tokenizer = tokenizers(family)
    texts = samples(tokenizer, Grammar("json_object"), 12)
    assert len(texts) >= 5
    assert all(isinstance(json.loads(text), dict) for text in texts)
    schema = SCHEMAS["object"]
    for text in samples(tokenizer, Grammar("json_schema", json.dumps(schema)), 8):
        Draft202012Validator(schema).validate(json.loads(text))


def test_a_regular_expression_is_matched_whole(tokenizers: Any, grammars: Grammars) -> None:
    pattern = r"(yes|no), [0-9]{2,4}( \w+)?\."
    texts = samples(tokenizers("llama3"), Grammar("regex", pattern), 40, grammars)
    assert len(texts) >= 30 and len(set(texts)) > 10
    assert all(re.fullmatch(pattern, text, re.ASCII) for text in texts)


def test_an_ebnf_grammar_is_followed(tokenizers: Any, grammars: Grammars) -> None:
    source = 'root ::= term ("+" term)*\nterm ::= [0-9]+ | "(" root ")"'
    texts = samples(tokenizers("llama3"), Grammar("ebnf", source), 40, grammars)
    assert len(texts) >= 20
    for text in texts:
        assert set(text) <= set("0123456789+()")
        compile(re.sub(r"\b0+(?=\d)", "", text), "answer", "eval")


CALL = SCHEMAS["object"]
TAGS = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["<tool_call>"],
        "tags": [
            {
                "type": "tag",
                "begin": "<tool_call>\n",
                "content": {"type": "json_schema", "json_schema": CALL},
                "end": "\n</tool_call>",
            }
        ],
    },
}


def spelled(constraint: Constraint, tokenizer: Any, text: str) -> bool:
    """Whether the grammar lets `text` through, token by token."""
    for token in tokenizer.encode(text, add_special_tokens=False):
        if not constraint.allowed()[token]:
            return False
        constraint.accept(token)
    return True


def test_a_structural_tag_allows_text_a_call_or_both(tokenizers: Any, grammars: Grammars) -> None:
    tokenizer, grammar = tokenizers("llama3"), Grammar("structural_tag", json.dumps(TAGS))
    end = tokenizer.eos_token_id
    call = '<tool_call>\n{"name": "Ann", "age": 7, "tags": []}\n</tool_call>'
    for text in ("Just text, with < and {braces}.\n", call, f"Let me see. {call} and {call}"):
        constraint = grammars.constraint(grammar)
        assert spelled(constraint, tokenizer, text), text
        assert constraint.allowed()[end], text
    for text in ("<tool_call>\nno", '<tool_call>\n{"name": 3', f"{call} <tool_call>\n[]"):
        assert not spelled(grammars.constraint(grammar), tokenizer, text), text
    unfinished = grammars.constraint(grammar)
    assert spelled(unfinished, tokenizer, call[:30])
    assert not unfinished.allowed()[end]


def test_calls_in_random_answers_validate(tokenizers: Any, grammars: Grammars) -> None:
    tags = json.loads(json.dumps(TAGS))
    tags["format"]["at_least_one"] = True
    tags["format"]["stop_after_first"] = True
    texts = samples(tokenizers("llama3"), Grammar("structural_tag", json.dumps(tags)), 30, grammars)
    assert len(texts) >= 15
    for text in texts:
        found = re.fullmatch(r"<tool_call>\n(.*)\n</tool_call>", text, re.DOTALL)
        assert found is not None
        Draft202012Validator(CALL).validate(json.loads(found[1]))


def test_special_tokens_are_never_allowed_and_the_end_only_at_an_end(
    tokenizers: Any, grammars: Grammars
) -> None:
    tokenizer = tokenizers("llama3")
    allowed = grammars.constraint(Grammar("regex", "(.|\\n)*")).allowed()
    special = set(tokenizer.all_special_ids) | set(range(len(tokenizer), len(allowed)))
    assert {t for t in special if allowed[t]} == {tokenizer.eos_token_id}
    constraint = grammars.constraint(Grammar("regex", "ab?"))
    (first,) = tokenizer.encode("a", add_special_tokens=False)
    assert not constraint.allowed()[tokenizer.eos_token_id]
    constraint.accept(first)
    assert constraint.allowed()[tokenizer.eos_token_id]


def test_a_fork_goes_its_own_way(tokenizers: Any, grammars: Grammars) -> None:
    tokenizer = tokenizers("llama3")
    constraint = grammars.constraint(Grammar("regex", "a(b|c)d"))
    a, b, c, d = (tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "abcd")
    constraint.accept(a)
    twin = constraint.fork()
    constraint.accept(b)
    assert twin.allowed()[c] and not twin.allowed()[d] and constraint.allowed()[d]


def test_logits_of_any_width_and_type_keep_what_is_allowed(
    tokenizers: Any, grammars: Grammars
) -> None:
    constraint = grammars.constraint(Grammar("regex", "[a-e]+"))
    allowed = constraint.allowed()
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        logits = torch.randn(len(allowed)).to(dtype)
        masked = constraint.apply(logits)
        assert torch.equal(masked[allowed], logits[allowed])
        assert bool((masked[~allowed] == -torch.inf).all())


BAD: list[tuple[GrammarKind, str, str]] = [
    ("json_schema", "{", "cannot be read"),
    ("json_schema", '{"type": "strnig"}', "strnig"),
    ("json_schema", "[]", "object or bool"),
    ("json_schema", '{"$ref": "#/nowhere"}', "nowhere"),
    ("json_schema", '{"allOf": [{"type": "object"}, {"type": "object"}]}', "merge"),
    ("json_schema", '{"properties": {"a": ' * 200 + "{}" + "}}" * 200, "deep"),
    ("json_schema", "[" * 100_000, "cannot be read"),
    ("json_schema", '"\ud800"', "surrogates"),
    ("regex", "(a", "parenthesis"),
    ("regex", "a\0", "null"),
    ("regex", "a" * (MOST_CHARACTERS + 1), "at most"),
    ("ebnf", "root ::= nothing", "nothing"),
    ("ebnf", "root ::= root", "matches no text"),
    ("structural_tag", "{}", "format"),
    ("structural_tag", '{"type": "structural_tag", "format": {"type": "no"}}', "no"),
]


@pytest.mark.parametrize(("kind", "source", "reason"), BAD, ids=lambda value: str(value)[:20])
def test_what_cannot_be_compiled_is_a_request_error_with_the_reason(
    grammars: Grammars, kind: GrammarKind, source: str, reason: str
) -> None:
    with pytest.raises(RequestError, match=reason) as caught:
        grammars.constraint(Grammar(kind, source))
    assert "/project/" not in str(caught.value)


def test_keywords_that_no_grammar_enforces_are_named_in_the_log(
    grammars: Grammars, caplog: pytest.LogCaptureFixture
) -> None:
    schema = {
        "type": "object",
        "properties": {
            "ids": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
            "path": {"type": "string", "pattern": 'C:\\\\.*"'},
            "code": {"type": "string", "pattern": "[a-c]+", "maxLength": 3},
        },
    }
    with caplog.at_level(logging.WARNING, logger="torch_cacheslide.grammar"):
        grammars.constraint(Grammar("json_schema", json.dumps(schema)))
    (message,) = caplog.messages
    for place in ("ids: uniqueItems", "path: pattern", "code: maxLength"):
        assert f"#/properties/{place}" in message


def test_a_model_without_an_end_token_takes_no_grammar(tokenizers: Any) -> None:
    grammars = Grammars(tokenizers("llama3"), 800, [])
    with pytest.raises(RequestError, match="eos_token_id"):
        grammars.constraint(Grammar("json_object"))


def test_a_missing_package_is_named_with_its_extra(
    tokenizers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "xgrammar", None)
    with pytest.raises(BackendError, match=r"xgrammar.*cacheslide-agents\[grammar\]"):
        Grammars(tokenizers("llama3"), 800, [1]).constraint(Grammar("json_object"))


def test_threads_share_one_compiler(tokenizers: Any) -> None:
    tokenizer = tokenizers("llama3")
    grammars = Grammars(tokenizer, 800, [tokenizer.eos_token_id])
    sources = [f"[a-c]{{{count}}}" for count in range(1, 9)] * 4
    with ThreadPoolExecutor(8) as pool:
        constraints = pool.map(lambda each: grammars.constraint(Grammar("regex", each)), sources)
        made = list(constraints)
    letters = [tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "abc"]
    assert all(each.allowed()[letter] for each in made for letter in letters)
