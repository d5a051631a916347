"""Does reuse happen on this backend, and does it leave the answer alone?

In: a backend. Out: findings, each of which holds or does not. Imports torch, unlike the commands.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from uuid import uuid4

from cacheslide_agents.answered import answered
from cacheslide_agents.backend import (
    Backend,
    GenerationRequest,
    PolicyLike,
    Receipt,
    Sampling,
    Scores,
)
from cacheslide_agents.bench.demo import demo_episode
from cacheslide_agents.bench.metrics import kl_divergence
from cacheslide_agents.chunks import ChunkedPrompt, EncodedPrompt
from cacheslide_agents.policies import CacheSlide, Recompute
from cacheslide_agents.prompt.chat import ChatEncoder
from cacheslide_agents.selection import Everything

TOKENS = 8
"""Greedy tokens of the dense run that are scored."""
PASSAGES = 3
"""Of the question's ten."""


@dataclass(frozen=True, slots=True)
class Finding:
    """`kl`: mean KL(dense || this run) over the scored tokens, natural logarithm."""

    name: str
    holds: bool
    kl: float
    reused_tokens: int
    prompt_tokens: int
    detail: str


@dataclass(frozen=True, slots=True)
class Compared:
    """A run under a policy, `kl` away from the dense run."""

    kl: float
    receipt: Receipt


@dataclass(frozen=True)
class Asked:
    """One prompt of the examination, with the dense run's tokens and their distributions."""

    backend: Backend
    prompt: EncodedPrompt
    namespace: str

    def request(self, policy: PolicyLike, *, retain: bool = False) -> GenerationRequest:
        return GenerationRequest.of(
            self.prompt,
            namespace=self.namespace,
            sampling=Sampling(max_tokens=TOKENS, ignore_eos=True),
            policy=policy,
            retain=retain,
        )

    @cached_property
    def tokens(self) -> tuple[int, ...]:
        return answered(self.backend, self.request(Recompute())).token_ids

    @cached_property
    def dense(self) -> Scores:
        return self.backend.score(self.request(Recompute()), self.tokens)

    def under(self, policy: PolicyLike) -> Compared:
        scores = self.backend.score(self.request(policy), self.tokens)
        return Compared(kl_divergence(self.dense.logprobs, scores.logprobs), scores.receipt)


def examine(backend: Backend, tolerance: float, max_kl: float) -> Iterator[Finding]:
    """Cache one turn of a shipped episode; ask it again, then the next turn, which has moved.

    `tolerance`: largest KL where reuse must equal dense prefill; `max_kl`: where it approximates.
    """
    encode, namespace = ChatEncoder(backend.tokenizer).encode, f"check-{uuid4().hex}"
    first, second = (Asked(backend, encode(prompt), namespace) for prompt in _prompts())
    reuse = CacheSlide(may_decline=False)
    backend.warm(first.request(reuse, retain=True))
    same = first.under(reuse)
    yield _finding("unchanged prompt equals dense", same, tolerance, _nothing_reused(same))
    again = second.under(replace(reuse, selector=Everything()))
    yield _finding("moved prompt, all recomputed, equals dense", again, tolerance, [])
    moved = second.under(reuse)
    trouble = _nothing_reused(moved) or _nothing_moved(moved)
    yield _finding("moved prompt is close to dense", moved, max_kl, trouble)


def _prompts() -> list[ChunkedPrompt]:
    """Two trials of a shipped question with few of its passages: enough to move, soon done."""
    episode = demo_episode()
    short = replace(episode.question, paragraphs=episode.question.paragraphs[:PASSAGES])
    return replace(episode, question=short).prompts()[:2]


def _nothing_reused(found: Compared) -> list[str]:
    return [] if found.receipt.reused_tokens else ["no token was reused"]


def _nothing_moved(found: Compared) -> list[str]:
    moved = any(chunk.reused and chunk.shift for chunk in found.receipt.chunks)
    return [] if moved else ["no reused chunk had moved"]


def _finding(name: str, found: Compared, limit: float, trouble: list[str]) -> Finding:
    receipt = found.receipt
    if receipt.outcome not in {"hit", "partial"}:
        trouble = [f"reuse did not happen: {receipt.outcome} ({receipt.reason})"]
    if not found.kl <= limit:
        trouble = [*trouble, f"KL to dense is {found.kl:.1e}, above {limit:.1e}"]
    seen = (
        f"{receipt.reused_tokens} of {receipt.prompt_tokens} tokens reused, "
        f"{receipt.compute_fraction:.1%} computed, KL to dense {found.kl:.1e}"
    )
    detail = "; ".join(trouble) or seen
    counts = (receipt.reused_tokens, receipt.prompt_tokens)
    return Finding(name, not trouble, found.kl, *counts, detail)
