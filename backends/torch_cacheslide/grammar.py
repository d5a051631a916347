"""Grammar-constrained decoding: only tokens that keep the answer inside its grammar are allowed.

In: a `Grammar` and the model's own tokenizer. Out: `Constraint`s, which forbid the logits of all
other tokens, and allow the end of the answer where the grammar may end. The automata are those of
xgrammar.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from cacheslide_agents.errors import BackendError, RequestError, install_hint
from cacheslide_agents.prompt.calls import CALL_TOKEN
from cacheslide_agents.sampling import Grammar, GrammarKind
from torch_cacheslide.detokenize import special_ids
from torch_cacheslide.schema import MOST_SPACES, prepared, rules_of
from torch_cacheslide.utf8 import Utf8Guard, well_formed

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar, GrammarCompiler, GrammarMatcher

log = logging.getLogger(__name__)
CACHE_BYTES = 64 << 20
"""Compiled grammars that are kept, least recently used out first."""
MOST_CHARACTERS = 1 << 18
MOST_NESTING = 128
"""Brackets inside brackets of a schema: compiling takes time in proportion to its square."""
SPACES = "max_whitespace_cnt"
UNWRITTEN = b"\xff"
"""For a token that leaves no trace in the text: a grammar that names it allows it, JSON never."""
_PREFIX = re.compile(r"^(?:\[[\d:]+\] )?\S+\.(?:cc|h):\d+: |Check failed: .*? is false: ")


class Grammars:
    """Compiles grammars for one tokenizer; for use by any thread.

    `vocabulary` is the width of the model's logits and `ends` the ids that may end an answer.
    Special tokens other than those would leave no trace in the text: none is allowed but the one
    that begins tool calls, at the beginning of an answer whose grammar names it.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, vocabulary: int, ends: Collection[int]
    ) -> None:
        self._tokenizer, self._vocabulary, self._ends = tokenizer, vocabulary, sorted(ends)
        self._ready = lru_cache(maxsize=64)(_checked)  # so that it logs once, not every time
        self._lock = Lock()
        self._made: GrammarEngine | None = None

    def constraint(self, grammar: Grammar) -> Constraint:
        """A new answer's constraint; the compiled grammar is kept for the next one.

        Raises `RequestError` with the reason when the grammar cannot be compiled or matches no
        text, and `BackendError` when xgrammar is not installed.
        """
        constraint = self._start(grammar)
        if not constraint.allowed().any():
            raise RequestError(f"the {grammar.kind} grammar matches no text; loosen it")
        return constraint

    def _start(self, grammar: Grammar) -> Constraint:
        engine = self._engine()
        from xgrammar import GrammarMatcher

        try:
            source = self._ready(grammar)
            matcher = GrammarMatcher(_compile(engine.compiler, grammar.kind, source))
        except (RuntimeError, TypeError, ValueError) as error:
            reason = _PREFIX.sub("", " ".join(str(error).split()))
            raise RequestError(f"the {grammar.kind} grammar cannot be used: {reason}") from error
        return Constraint(matcher, engine, self._vocabulary, '"type": "token"' in source)

    def _engine(self) -> GrammarEngine:
        with self._lock:
            if self._made is None:
                self._made = self._make()
            return self._made

    def _make(self) -> GrammarEngine:
        try:
            from xgrammar import GrammarCompiler, TokenizerInfo, VocabType
        except ImportError as error:
            raise BackendError(
                f"a grammar needs a package that is not installed ({error}); "
                f"{install_hint('grammar')}"
            ) from error
        if not self._ends:
            raise RequestError(
                "a grammar needs a token that ends the answer, and this model names none; set "
                "eos_token_id in its generation_config.json"
            )
        seen = TokenizerInfo.from_huggingface(
            self._tokenizer, vocab_size=self._vocabulary, stop_token_ids=self._ends
        )
        special, pieces = special_ids(self._tokenizer), [*map(bytes, seen.decoded_vocab)]
        opening = [token for token in special if pieces[token : token + 1] == [CALL_TOKEN.encode()]]
        for token, piece in enumerate(pieces):
            if token in special or not well_formed(piece):
                pieces[token] = UNWRITTEN if token in opening else b""  # which is never allowed
        info = TokenizerInfo(
            pieces,
            VocabType.RAW,
            vocab_size=self._vocabulary,
            stop_token_ids=self._ends,
            add_prefix_space=seen.add_prefix_space,
        )
        compiler = GrammarCompiler(
            info, max_threads=torch.get_num_threads(), cache_limit_bytes=CACHE_BYTES
        )
        return GrammarEngine(compiler, Utf8Guard(pieces), opening)


@dataclass(frozen=True)
class GrammarEngine:
    """xgrammar's compiler for one tokenizer, and what it needs besides."""

    compiler: GrammarCompiler
    guard: Utf8Guard
    opening: list[int]


class Constraint:
    """One answer's place in its grammar. `opens`: it may begin with the engine's `opening`."""

    def __init__(
        self, matcher: GrammarMatcher, engine: GrammarEngine, vocabulary: int, opens: bool
    ) -> None:
        self._matcher, self._engine, self._vocabulary = matcher, engine, vocabulary
        self._opens, self._last = opens, -1
        self._bits = np.zeros((1, -(-vocabulary // 32)), dtype=np.int32)

    def apply(self, logits: Tensor) -> Tensor:
        """`logits` [vocabulary] with -inf for what the grammar forbids here."""
        allowed = self.allowed()
        if not allowed.any():
            raise RequestError("the grammar cannot be continued with any of the model's tokens")
        return logits.masked_fill(~allowed.to(logits.device), -torch.inf)

    def accept(self, token: int) -> None:
        """Go on with `token`, which must be an allowed one."""
        if not self._matcher.accept_token(token):
            raise RequestError(f"token {token} does not continue the grammar")
        self._opens, self._last = False, token

    def fork(self) -> Constraint:
        """Another answer at the same place."""
        twin = copy(self)
        twin._matcher, twin._bits = self._matcher.fork(), self._bits.copy()
        return twin

    def allowed(self) -> Tensor:
        """Which tokens may come next, bool [vocabulary]."""
        self._matcher.fill_next_token_bitmask(self._bits)
        flags = np.unpackbits(self._bits.view(np.uint8), count=self._vocabulary, bitorder="little")
        allowed = flags.view(np.bool_)
        if not self._opens:
            allowed[self._engine.opening] = False
        wrong = self._engine.guard.wrong_after(self._last)
        return torch.from_numpy(allowed if wrong is None else allowed & ~wrong)


def _compile(compiler: GrammarCompiler, kind: GrammarKind, source: str) -> CompiledGrammar:
    match kind:
        case "json_object":
            return compiler.compile_json_schema(
                '{"type": "object"}', strict_mode=False, max_whitespace_cnt=MOST_SPACES
            )
        case "regex":
            return compiler.compile_regex(source)
        case "json_schema" | "ebnf":
            return compiler.compile_grammar(source)
        case "structural_tag":
            return compiler.compile_structural_tag(source)


def _checked(grammar: Grammar) -> str:
    """The source, made ready, if it is one whose compilation ends soon."""
    if len(grammar.source) > MOST_CHARACTERS:
        raise RequestError(
            f"the {grammar.kind} grammar has {len(grammar.source)} characters; "
            f"at most {MOST_CHARACTERS} are handled"
        )
    try:
        grammar.source.encode()
        if grammar.kind not in ("json_schema", "structural_tag"):
            return grammar.source
        parsed = json.loads(grammar.source)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the {grammar.kind} grammar cannot be read: {error}") from error
    _check_nesting(parsed, grammar)
    if grammar.kind == "json_schema":
        return rules_of(_schema(parsed))
    return json.dumps(_tags(parsed))


def _schema(schema: Any) -> Any:
    ready, unchecked = prepared(schema)
    if unchecked:
        log.warning("a grammar does not enforce %s: check the answer", ", ".join(unchecked))
    return ready


def _tags(value: Any) -> Any:
    """A structural tag, the JSON schemas in it made ready and their white space bounded.

    Other keys than ours, such as another style than JSON, are the engine's own business.
    """
    if isinstance(value, list):
        return [_tags(each) for each in value]
    if not isinstance(value, dict):
        return value
    if value.get("type") == "json_schema" and "json_schema" in value:
        ready, spaces = _schema(value["json_schema"]), value.get(SPACES, MOST_SPACES)
        if value.keys() <= {"type", "json_schema", SPACES}:
            return {"type": "grammar", "grammar": rules_of(ready, spaces)}
        return {**value, SPACES: spaces, "json_schema": ready}
    return {key: _tags(each) for key, each in value.items()}


def _check_nesting(value: Any, grammar: Grammar) -> None:
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MOST_NESTING:
            raise RequestError(
                f"the {grammar.kind} grammar is nested more than {MOST_NESTING} deep; flatten it"
            )
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
