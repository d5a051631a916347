"""Measures policies on one turn, through nothing but the `Backend` protocol.

In: a `Turn` and policies by label. Out: one `Row` per policy: time to first token, work done, and
the distance of its next-token distributions from those of the dense run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from uuid import uuid4

from cacheslide_agents.answered import answered
from cacheslide_agents.backend import Backend, GenerationRequest, Receipt, Sampling, Scores
from cacheslide_agents.bench.metrics import (
    exact_match,
    first_line,
    kl_divergence,
    token_f1,
    top1_agreement,
)
from cacheslide_agents.bench.results import Row
from cacheslide_agents.bench.workloads.base import Turn
from cacheslide_agents.chunks import ChunkedPrompt, EncodedPrompt
from cacheslide_agents.policies.base import Policy, Population
from cacheslide_agents.position.profile import Calibrates

REFERENCE = "recompute"
"""Label of the dense run, which every measurement needs."""
WRITTEN = ("memory_write_bytes", "ssd_write_bytes")
"""A backend's metrics that count what it stored."""
Encode = Callable[[ChunkedPrompt], EncodedPrompt]
Policies = Mapping[str, Policy]
Kind = tuple[Population, bool]
"""How a context was made, and whether at canonical positions (CCPE)."""


@dataclass(frozen=True)
class Populated:
    """A turn whose previous prompt is cached in namespaces of its own.

    `seconds` and `bytes_written` are what each kind of population took. `canonical`: the backend
    has a CCPE profile of the task, which makes other contexts for policies that use it.
    """

    turn: Turn
    namespace: str
    previous: EncodedPrompt
    prompt: EncodedPrompt
    seconds: Mapping[Kind, float]
    bytes_written: Mapping[Kind, int]
    canonical: bool = False

    def kind(self, policy: Policy) -> Kind:
        return policy.population, self.canonical and policy.ccpe

    def within(self, policy: Policy) -> str:
        """The namespace that holds what `policy` reuses."""
        return f"{self.namespace}-ccpe" if self.kind(policy)[1] else self.namespace

    @property
    def first_change(self) -> int:
        """The first token index at which the two prompts differ."""
        old, new = self.previous.ids, self.prompt.ids
        shorter = min(len(old), len(new))
        return next((i for i in range(shorter) if old[i] != new[i]), shorter)


@dataclass(frozen=True, slots=True)
class Timed:
    """One policy's answer. `seconds` run from before tokenisation to the first token."""

    seconds: float
    token_ids: tuple[int, ...]
    text: str
    receipt: Receipt
    bytes_written: int


@dataclass(frozen=True)
class Bench:
    """How turns are measured.

    `repeats` timed answers per policy, of which the median counts; `answer_tokens` new tokens make
    an answer (0: no answers); `kl_tokens` greedy tokens of the dense run are scored.
    """

    backend: Backend
    encode: Encode
    repeats: int = 1
    answer_tokens: int = 32
    kl_tokens: int = 16

    def populate(self, turn: Turn, policies: Policies) -> Populated:
        """Cache turn t-1 once per kind of population that `policies` need."""
        previous, prompt = self.encode(turn.populate), self.encode(turn.measure)
        seconds: dict[Kind, float] = {}
        written: dict[Kind, int] = {}
        canonical = isinstance(self.backend, Calibrates) and previous.task in self.backend.profiled
        namespace = f"bench-{uuid4().hex}"
        populated = Populated(turn, namespace, previous, prompt, seconds, written, canonical)
        # residual checkpoints are stored only under a gate, and do not harm who needs none
        for policy in sorted(policies.values(), key=lambda policy: policy.gate is None):
            kind = populated.kind(policy)
            if policy.population is not Population.NONE and kind not in seconds:
                before, begin = self._bytes_written(), perf_counter()
                self.backend.warm(_request(previous, populated.within(policy), policy, retain=True))
                seconds[kind] = perf_counter() - begin
                written[kind] = self._bytes_written() - before
        return populated

    def warm_up(self, populated: Populated, policies: Policies) -> None:
        """Answer once under every policy, so that no later time holds what happens only once."""
        for policy in policies.values():
            self.time(populated, policy, max_tokens=1)

    def measure(self, populated: Populated, policies: Policies, rotate: int = 0) -> list[Row]:
        """One row per policy, in the given order; they run interleaved, rotated by `rotate`.

        With answers, all are timed first and scored afterwards. Without, the dense run answers
        first, for its tokens, and every other policy is timed by its scoring: one prefill gives
        both the time and the distributions.
        """
        labels = list(policies)
        first = rotate % len(labels)
        order = labels[first:] + labels[:first]
        if not self.answer_tokens:
            order.sort(key=lambda label: label != REFERENCE)
        timed: dict[str, list[Timed]] = {label: [] for label in labels}
        scores: dict[str, Scores] = {}
        for repeat in range(self.repeats):
            for label in order:
                if label == REFERENCE or self.answer_tokens:
                    tokens = 1 if repeat else self._new_tokens(label)
                    timed[label].append(self.time(populated, policies[label], tokens))
                else:
                    forced = timed[REFERENCE][0].token_ids[: self.kl_tokens]
                    one, scores[label] = self._time_score(populated, policies[label], forced)
                    timed[label].append(one)
        continuation = timed[REFERENCE][0].token_ids[: self.kl_tokens]
        for label in labels:
            if label not in scores:
                scores[label] = self._score(populated, policies[label], continuation)
        return [
            self._row(populated, label, policy, timed[label], scores[REFERENCE], scores[label])
            for label, policy in policies.items()
        ]

    def time(self, populated: Populated, policy: Policy, max_tokens: int) -> Timed:
        """Tokenise, plan and answer turn t greedily; nothing of it becomes a cached context."""
        written = self._bytes_written()
        begin = perf_counter()
        prompt = self.encode(populated.turn.measure)
        request = _request(prompt, populated.within(policy), policy, max_tokens=max_tokens)
        got = answered(self.backend, request, started=begin)
        written = self._bytes_written() - written
        return Timed(got.ttft_s, got.token_ids, got.text, got.receipt, written)

    def _new_tokens(self, label: str) -> int:
        """The dense run must also give the tokens to score."""
        return max(self.answer_tokens, self.kl_tokens if label == REFERENCE else 1)

    def _time_score(
        self, populated: Populated, policy: Policy, continuation: Sequence[int]
    ) -> tuple[Timed, Scores]:
        """Tokenise, plan and score; the backend's receipt says when the first token was there."""
        written = self._bytes_written()
        begin = perf_counter()
        prompt = self.encode(populated.turn.measure)
        encoded = perf_counter() - begin
        scores = self.backend.score(
            _request(prompt, populated.within(policy), policy), continuation
        )
        seconds, bytes_written = encoded + scores.receipt.ttft_s, self._bytes_written() - written
        return Timed(seconds, tuple(continuation), "", scores.receipt, bytes_written), scores

    def _score(self, populated: Populated, policy: Policy, continuation: Sequence[int]) -> Scores:
        request = _request(populated.prompt, populated.within(policy), policy)
        return self.backend.score(request, continuation)

    def _bytes_written(self) -> int:
        told = self.backend.metrics()
        return int(sum(told.get(name, 0.0) for name in WRITTEN))

    def _row(
        self,
        populated: Populated,
        label: str,
        policy: Policy,
        timed: Sequence[Timed],
        dense: Scores,
        scores: Scores,
    ) -> Row:
        fallen = [one for one in (scores.receipt, *(t.receipt for t in timed)) if _fell(one)]
        receipt = fallen[0] if fallen else timed[0].receipt
        gold = populated.turn.answers if self.answer_tokens else ()
        answer = first_line(timed[0].text) if self.answer_tokens else None
        return Row(
            id=populated.turn.id,
            turn=populated.turn.turn,
            policy=label,
            prompt_tokens=receipt.prompt_tokens,
            first_change=populated.first_change,
            reused_tokens=0 if fallen else receipt.reused_tokens,
            active_tokens=receipt.active_tokens,
            compute_fraction=receipt.compute_fraction,
            populate_s=populated.seconds.get(populated.kind(policy), 0.0),
            ttft_s=median(one.seconds for one in timed),
            kl=kl_divergence(dense.logprobs, scores.logprobs),
            top1=top1_agreement(dense.logprobs, scores.logprobs),
            answer=answer,
            f1=token_f1(answer, gold) if answer is not None and gold else None,
            em=exact_match(answer, gold) if answer is not None and gold else None,
            outcome=receipt.outcome,
            reason=receipt.reason,
            bytes_written=timed[0].bytes_written
            + populated.bytes_written.get(populated.kind(policy), 0),
            peak_kv_bytes=receipt.peak_kv_bytes,
        )


def _request(
    prompt: EncodedPrompt,
    namespace: str,
    policy: Policy,
    *,
    max_tokens: int = 1,
    retain: bool = False,
) -> GenerationRequest:
    return GenerationRequest.of(
        prompt,
        namespace=namespace,
        sampling=Sampling(max_tokens=max_tokens),
        policy=policy,
        retain=retain,
    )


def _fell(receipt: Receipt) -> bool:
    return receipt.outcome == "fallback"
