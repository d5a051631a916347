"""Sessions that ask one backend all at once, leave when they like, and do not trust its answers.

In: any backend that answers many requests at once. Out: a `Record`: what was asked and answered,
and in `errors` every answer that cannot be right. Nothing here knows vLLM.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any

from cacheslide_agents.backend import GenerationChunk, GenerationRequest, Receipt, Sampling
from cacheslide_agents.policies import CacheSlide, Recompute
from cacheslide_agents.policies.base import Policy
from cacheslide_agents.selection import Everything

POLICIES: Mapping[str, Policy] = {
    "reused": CacheSlide(may_decline=False),
    "corrected": CacheSlide(selector=Everything(), may_decline=False),
    "dense": Recompute(),
}
EXACT = ("corrected", "dense")
"""Answers that must be those of a dense run, token by token."""
EXPECTED = ("PageError",)
"""Reasons for a fallback that a small store gives: the context was there when it was planned."""
TURNS = 6
NEW_TOKENS = 16
TIE = 1e-3
"""Log-probabilities nearer than this may change places when other requests share the batch."""
PATIENCE_S = 300
ABORTS = 0.15


@dataclass(frozen=True, slots=True)
class Answer:
    """Greedy tokens, and before each the two most likely ones with their log-probabilities."""

    tokens: tuple[int, ...]
    likely: tuple[tuple[tuple[int, float], ...], ...]
    receipt: Receipt


@dataclass(frozen=True, slots=True)
class Sample:
    """An answer given among others, to be asked again alone."""

    name: str
    ids: list[int]
    answer: Answer


@dataclass
class Record:
    """`samples` are chosen evenly from all exact answers, at most `most` of them."""

    most: int = 40
    asked: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    checked: int = 0
    ties: int = 0
    _exact: int = 0

    def keep(self, sample: Sample, random: Random) -> None:
        self._exact += 1
        if len(self.samples) < self.most:
            self.samples.append(sample)
        elif (place := random.randrange(self._exact)) < self.most:
            self.samples[place] = sample


class Session:
    """One agent after another under one number, each with a marker of its own in every prompt.

    Apart from the marker all prompts are made of the same text, so that a context or a block of
    another session would fit.
    """

    def __init__(
        self, backend: Any, number: int, text: list[int], record: Record, seed: int
    ) -> None:
        self._backend, self._number, self._text, self._record = backend, number, text, record
        self._random = Random(f"{seed}-{number}")

    async def run(self, over: Callable[[], bool]) -> None:
        """Until `over()`; an error ends the session and stands in the record."""
        agents = 0
        while not over():
            name = f"session-{self._number}-{agents}"
            agents += 1
            marker = [self._random.choice(self._text) for _ in range(24)]
            cold = True
            for turn in range(TURNS):
                if over():
                    return
                try:
                    stored = await self._turn(f"{name}-{turn}", name, marker, cold)
                except Exception as error:
                    self._record.errors.append(f"{name}, turn {turn}: {error!r}")
                    return
                cold = cold and not stored

    async def _turn(self, name: str, namespace: str, marker: list[int], cold: bool) -> bool:
        """Whether the prompt may be in the store now."""
        kind = self._random.choice(list(POLICIES))
        ids = self._prompt(marker)
        request = asked(ids, POLICIES[kind], namespace)
        self._record.asked[kind] += 1
        if self._random.random() < ABORTS:
            self._record.asked["aborted"] += 1
            await self._leave(request)
            return True
        answer = await asyncio.wait_for(answered(self._backend, request), PATIENCE_S)
        self._judge(name, kind, request, answer, cold)
        if kind in EXACT:
            self._record.keep(Sample(name, ids, answer), self._random)
        return kind != "dense"

    def _prompt(self, marker: list[int]) -> list[int]:
        """Marker, head, an update of another length every time, tail, marker."""
        cut = len(self._text) // 4
        start = self._random.randrange(cut)
        update = self._text[start : start + self._random.randrange(8, cut)]
        return [*marker, *self._text[:cut], *update, *self._text[cut:], *marker]

    async def _leave(self, request: GenerationRequest) -> None:
        """Before the first token, or in the middle of the answer."""
        if self._random.random() < 0.5:
            patience = self._random.random() * 0.2
            with suppress(TimeoutError):
                await asyncio.wait_for(answered(self._backend, request), patience)
            return
        tokens = self._random.randrange(1, NEW_TOKENS)
        async with aclosing(self._backend.agenerate(request)) as pieces:
            async for _ in pieces:
                tokens -= 1
                if not tokens:
                    return

    def _judge(
        self, name: str, kind: str, request: GenerationRequest, answer: Answer, cold: bool
    ) -> None:
        receipt, record = answer.receipt, self._record
        record.outcomes[receipt.outcome] += 1
        if receipt.outcome == "fallback":
            record.reasons[receipt.reason.partition(":")[0]] += 1
        wrong = {
            f"the receipt is that of {receipt.request_id}": receipt.request_id
            != request.request_id,
            f"{len(answer.tokens)} tokens": len(answer.tokens) != NEW_TOKENS,
            f"a prompt of {receipt.prompt_tokens} tokens": receipt.prompt_tokens
            != len(request.prompt_ids),
            f"{receipt.reused_tokens} tokens of a first prompt reused": cold
            and receipt.reused_tokens > 0,
            f"{receipt.reused_tokens} tokens of a dense one reused": kind == "dense"
            and receipt.reused_tokens > 0,
            f"fallback: {receipt.reason}": receipt.outcome == "fallback"
            and not receipt.reason.startswith(EXPECTED),
        }
        record.errors += [f"{name}, {kind}: {what}" for what, is_so in wrong.items() if is_so]


def asked(ids: list[int], policy: Policy, namespace: str) -> GenerationRequest:
    sampling = Sampling(max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=2)
    return GenerationRequest(ids, namespace=namespace, policy=policy, sampling=sampling)


async def answered(backend: Any, request: GenerationRequest) -> Answer:
    pieces: list[GenerationChunk] = [piece async for piece in backend.agenerate(request)]
    receipts = [piece.receipt for piece in pieces if piece.receipt is not None]
    tokens = tuple(token for piece in pieces for token in piece.token_ids)
    likely = tuple(told.top for piece in pieces for told in piece.logprobs or ())
    return Answer(tokens, likely, receipts[-1])


async def check(backend: Any, record: Record) -> None:
    """Ask every sample again, densely and alone: the tokens must be the same."""
    for sample in record.samples:
        again = await answered(backend, asked(sample.ids, Recompute(), "checked"))
        record.checked += 1
        if sample.answer.tokens == again.tokens:
            continue
        if tied(sample.answer, again):
            record.ties += 1
        else:
            record.errors.append(
                f"{sample.name}: {sample.answer.tokens} among others, {again.tokens} alone"
            )


def tied(one: Answer, other: Answer) -> bool:
    """Whether they part where two tokens are equally likely."""
    place = next(
        number
        for number, pair in enumerate(zip(one.tokens, other.tokens, strict=True))
        if pair[0] != pair[1]
    )
    for answer in (one, other):
        (_, first), (_, second) = answer.likely[place][:2]
        if first - second > TIE:
            return False
    return True
