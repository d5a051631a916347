"""Control tokens: which strings a model reads as structure, and a tokenizer that can withhold them.

In: a `tokenizers.Tokenizer` and the chat template's source and plainest rendering. Out: the
`ControlTokens` of the model, and private copies of its tokenizer.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from tokenizers import AddedToken, Tokenizer


@dataclass(frozen=True)
class ControlTokens:
    """Added tokens that a value must not become.

    `roles`: special tokens and the added tokens around messages; a value may never become one.
    `structure`: other added tokens that the chat template writes (`<think>`, `<tool_call>`); the
    model itself writes them too, so they are allowed in assistant text and nowhere else.
    `unknown`: the token that also stands for text the vocabulary cannot spell.
    `cuttable`: whether text may be tokenised apart on either side of every control token.
    """

    roles: Mapping[str, int]
    structure: Mapping[str, int]
    unknown: str | None
    cuttable: bool

    @classmethod
    def of(
        cls, backend: Tokenizer, template: str, roles_rendering: str, unknown: str | None
    ) -> ControlTokens:
        """`roles_rendering`: bare turns of every role as `template` renders them."""
        roles, structure = {}, {}
        added = backend.get_added_tokens_decoder()
        for number, token in added.items():
            if token.special or token.content in roles_rendering:
                roles[token.content] = number
            elif token.content in template and not token.content.isspace():
                structure[token.content] = number
        named = [token for token in added.values() if token.content in roles | structure]
        return cls(roles, structure, unknown, cuttable=not any(map(_reaches_out, named)))

    @cached_property
    def all(self) -> dict[str, int]:
        return {**self.roles, **self.structure}

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        return _any_of(self.all)

    @cached_property
    def roles_pattern(self) -> re.Pattern[str]:
        return _any_of(self.roles)


def _reaches_out(token: AddedToken) -> bool:
    """Whether a token's match depends on, or swallows, the text around it."""
    return bool(token.lstrip or token.rstrip or token.single_word or token.normalized)


def _any_of(names: Collection[str]) -> re.Pattern[str]:
    longest_first = sorted(names, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


@dataclass(frozen=True)
class PrivateTokenizer:
    """A private tokenizer and the names under which it knows the control tokens."""

    backend: Tokenizer
    names: Mapping[str, str] = field(default_factory=dict)

    def name(self, control: str) -> str:
        return self.names.get(control, control)


def private_tokenizer(backend: Tokenizer) -> PrivateTokenizer:
    """A copy that nobody else can set to truncate or pad, with exact character offsets.

    The model is shared, so this costs no time; the post-processor, which only adds outer special
    tokens and trims offsets, is left out.
    """
    copy = Tokenizer(backend.model)
    if backend.normalizer is not None:
        copy.normalizer = backend.normalizer
    if backend.pre_tokenizer is not None:
        copy.pre_tokenizer = backend.pre_tokenizer
    added = backend.get_added_tokens_decoder()
    copy.add_tokens([added[number] for number in sorted(added)])
    if _numbers(copy) != _numbers(backend):
        return _rebuilt(backend, {})
    return PrivateTokenizer(copy)


def withholding_tokenizer(backend: Tokenizer, controls: Iterable[str]) -> PrivateTokenizer:
    """A copy that reads `controls` as plain text and knows them by unguessable names instead.

    Ids and everything else stay as they are. Costs a parse of the tokenizer file.
    """
    nonce = secrets.token_hex(12)
    return _rebuilt(backend, {name: f"zq{nonce}k{i}z" for i, name in enumerate(controls)})


def _numbers(backend: Tokenizer) -> dict[str, int]:
    return {token.content: number for number, token in backend.get_added_tokens_decoder().items()}


def _rebuilt(backend: Tokenizer, names: Mapping[str, str]) -> PrivateTokenizer:
    state = json.loads(backend.to_str())
    state.update(truncation=None, padding=None, post_processor=None)
    for token in state["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    _rename_pieces(state["model"], names)
    return PrivateTokenizer(Tokenizer.from_str(json.dumps(state)), names)


def _rename_pieces(model: dict[str, Any], names: Mapping[str, str]) -> None:
    """Models may list control tokens as ordinary pieces, and merge plain text into them."""
    vocab = model.get("vocab")
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(piece, piece): number for piece, number in vocab.items()}
    elif isinstance(vocab, list):
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocab]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if "merges" in model:
        pairs = (m.split(" ", 1) if isinstance(m, str) else m for m in model["merges"])
        model["merges"] = [
            (left, right)
            for left, right in pairs
            if left not in names and right not in names and left + right not in names
        ]
