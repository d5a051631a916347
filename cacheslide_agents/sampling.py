"""How an answer is drawn from the model's distributions, and what is told about it.

In: nothing but numbers and strings. Out: `Sampling` and `Grammar`, which travel in a request, and
`TokenLogprob`, which travels back.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from numbers import Integral, Real
from sys import float_info
from typing import Any, Literal, get_args

from cacheslide_agents.errors import RequestError

GrammarKind = Literal["json_object", "json_schema", "regex", "ebnf", "structural_tag"]
MOST_ALTERNATIVES = 100
"""Alternatives per token that `logprobs` may ask for."""
MOST_ANSWERS = 1024
MOST_BEAMS = 256
"""Each answer and each beam takes a row of a batch, and memory for all its tokens."""
MILDEST_PENALTY, HARSHEST_PENALTY = 0.01, 100.0
"""Of repetition: beyond them 16-bit and 32-bit logits are not finite any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Decoding parameters; the defaults are greedy decoding of one answer, all filters off.

    `top_k=0`, `top_p=1`, `min_p=0` and `repetition_penalty=1` switch those off. `n` answers share
    one prefill. `num_beams > 1` searches instead of sampling: `n` best beams, ranked by summed
    log-probability / length ** `length_penalty`. At most 1,024 answers and 256 beams;
    `repetition_penalty` is from 0.01 to 100. `logprobs=k` returns log-probabilities of the
    chosen tokens and of the k most likely ones, before any filter or temperature.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    num_beams: int = 1
    length_penalty: float = 1.0
    logprobs: int | None = None

    def __post_init__(self) -> None:
        checks = {
            "max_tokens": (_whole(self.max_tokens, 1), "at least 1, and whole"),
            "temperature": (_finite(self.temperature, 0.0), "finite and at least 0"),
            "top_p": (_finite(self.top_p, 0.0, 1.0) and self.top_p > 0.0, "above 0 and at most 1"),
            "top_k": (_whole(self.top_k, 0), "at least 0 (0 means no limit), and whole"),
            "min_p": (_finite(self.min_p, 0.0, 1.0), "from 0 (off) to 1"),
            "repetition_penalty": (
                _finite(self.repetition_penalty, MILDEST_PENALTY, HARSHEST_PENALTY),
                f"from {MILDEST_PENALTY:g} to {HARSHEST_PENALTY:g} (1 means none)",
            ),
            "seed": (self.seed is None or _whole(self.seed, -inf), "whole, or None"),
            "stop": (_all(self.stop, str) and all(self.stop), "made of non-empty strings"),
            "stop_token_ids": (_all(self.stop_token_ids, Integral), "made of token ids"),
            "n": (_whole(self.n, 1, MOST_ANSWERS), f"from 1 to {MOST_ANSWERS}, and whole"),
            "num_beams": (
                _whole(self.num_beams, 1, MOST_BEAMS),
                f"from 1 to {MOST_BEAMS}, and whole",
            ),
            "length_penalty": (_finite(self.length_penalty, -float_info.max), "finite"),
            "logprobs": (
                self.logprobs is None or _whole(self.logprobs, 0, MOST_ALTERNATIVES),
                f"None, or from 0 to {MOST_ALTERNATIVES}",
            ),
        }
        for name, (holds, rule) in checks.items():
            if not holds:
                raise RequestError(f"{name}={getattr(self, name)!r} must be {rule}")
        if 1 < self.num_beams < self.n:
            raise RequestError(f"n={self.n} asks for more answers than num_beams={self.num_beams}")


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the answer must match. `source` is a JSON schema or structural tag (as JSON text), a
    regular expression or EBNF; empty for `json_object`, which is any JSON object.
    """

    kind: GrammarKind
    source: str = ""

    def __post_init__(self) -> None:
        if self.kind not in get_args(GrammarKind):
            known = ", ".join(get_args(GrammarKind))
            raise RequestError(f"grammar kind {self.kind!r} is unknown; known: {known}")
        if not isinstance(self.source, str) or bool(self.source) == (self.kind == "json_object"):
            raise RequestError(
                f"a {self.kind} grammar takes "
                + ("no source" if self.kind == "json_object" else "its source as a string")
            )


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural log-probability of a token, and (id, log-probability) of the most likely ones."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def _whole(value: object, least: float, most: float = inf) -> bool:
    return isinstance(value, Integral) and _within(value, least, most)


def _finite(value: object, least: float, most: float = float_info.max) -> bool:
    return isinstance(value, Real) and _within(value, least, most)


def _within(value: Any, least: float, most: float) -> bool:
    """`True` is no number here."""
    return not isinstance(value, bool) and bool(least <= value <= most)


def _all(values: object, kind: type) -> bool:
    """A string is no collection of strings here: its letters would each be one."""
    return isinstance(values, tuple | list | set | frozenset) and all(
        isinstance(value, kind) for value in values
    )
