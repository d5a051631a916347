"""`cacheslide check`: does reuse happen on this machine, and does it leave the answer alone?

In: a backend. Out: findings, each of which holds or does not; exit code 1 when one does not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Annotated
from uuid import uuid4

import typer

from cacheslide_agents.backend import (
    Backend,
    GenerationRequest,
    PolicyLike,
    Receipt,
    Sampling,
    Scores,
)
from cacheslide_agents.chunks import EncodedPrompt
from cacheslide_agents.cli import options
from cacheslide_agents.cli.console import DOES_NOT_HOLD, emit, screen
from cacheslide_agents.cli.engine import opened
from cacheslide_agents.prompt.chat import ChatEncoder

TOKENS = 8
"""Greedy tokens of the dense run that are scored."""


@dataclass(frozen=True, slots=True)
class Finding:
    """`kl`: mean KL(dense || this run) over the scored tokens, natural logarithm."""

    name: str
    holds: bool
    kl: float
    reused_tokens: int
    prompt_tokens: int
    detail: str


@dataclass(frozen=True)
class Probe:
    """Two turns of an agent that differ in a chunk in the middle, in a namespace of their own."""

    backend: Backend
    first: EncodedPrompt
    second: EncodedPrompt
    namespace: str

    def request(
        self, prompt: EncodedPrompt, policy: PolicyLike, max_tokens: int = 1
    ) -> GenerationRequest:
        return GenerationRequest(
            prompt_ids=prompt.ids,
            spans=prompt.spans,
            namespace=self.namespace,
            task=prompt.task,
            sampling=Sampling(max_tokens=max_tokens, ignore_eos=True),
            policy=policy,
            retain=False,
        )

    def dense(self, prompt: EncodedPrompt) -> tuple[list[int], Scores]:
        """Greedy tokens and their distributions, nothing reused."""
        from cacheslide_agents.policies import Recompute

        request = self.request(prompt, Recompute(), TOKENS)
        tokens = [id_ for chunk in self.backend.generate(request) for id_ in chunk.token_ids]
        return tokens, self.backend.score(request, tokens)


def check(
    model: options.Model = options.DEFAULT_MODEL,
    backend: options.BackendName = options.DEFAULT_BACKEND,
    device: options.Device = None,
    dtype: options.Dtype = None,
    threads: options.Threads = None,
    tolerance: Annotated[
        float, typer.Option(help="Largest KL where reuse must equal dense prefill.")
    ] = 1e-3,
    max_kl: Annotated[float, typer.Option(help="Largest KL of a shifted reuse.")] = 0.1,
    as_json: options.Json = False,
) -> None:
    """Fill the cache with one turn, reuse it for a shifted one, and compare with dense prefill."""
    with opened(backend, model, device=device, dtype=dtype, threads=threads) as loaded:
        findings = list(examine(loaded, tolerance, max_kl))
        model_id = loaded.model_id
    holds = all(finding.holds for finding in findings)
    if as_json:
        emit({"model": model_id, "holds": holds, "findings": [asdict(one) for one in findings]})
    else:
        for finding in findings:
            screen().print(
                f"{'ok  ' if finding.holds else 'FAIL'} {finding.name}: {finding.detail}"
            )
    if not holds:
        raise typer.Exit(DOES_NOT_HOLD)


def examine(backend: Backend, tolerance: float, max_kl: float) -> Iterator[Finding]:
    """Every finding in turn; the first turn of a shipped episode is cached, the second asked."""
    from cacheslide_agents.bench.demo import demo_episode
    from cacheslide_agents.policies import CacheSlide
    from cacheslide_agents.selection import Everything

    encode = ChatEncoder(backend.tokenizer).encode
    first, second, *_ = (encode(prompt) for prompt in demo_episode().prompts())
    probe = Probe(backend, first, second, f"check-{uuid4().hex}")
    reuse = CacheSlide(may_decline=False)
    backend.warm(replace(probe.request(first, reuse), retain=True))
    same = _compare(probe, first, reuse)
    yield _finding("unchanged prompt equals dense", same, tolerance, must_reuse=True)
    all_again = replace(reuse, selector=Everything())
    moved = _compare(probe, second, all_again)
    yield _finding("shifted, all recomputed, equals dense", moved, tolerance, must_reuse=False)
    shifted = _compare(probe, second, reuse)
    yield _finding("shifted reuse", shifted, max_kl, must_reuse=True, must_shift=True)


@dataclass(frozen=True, slots=True)
class Comparison:
    kl: float
    receipt: Receipt


def _compare(probe: Probe, prompt: EncodedPrompt, policy: PolicyLike) -> Comparison:
    from cacheslide_agents.bench.metrics import kl_divergence

    tokens, dense = probe.dense(prompt)
    scores = probe.backend.score(probe.request(prompt, policy), tokens)
    return Comparison(kl_divergence(dense.logprobs, scores.logprobs), scores.receipt)


def _finding(
    name: str, found: Comparison, limit: float, *, must_reuse: bool, must_shift: bool = False
) -> Finding:
    receipt = found.receipt
    troubles = []
    if receipt.outcome in {"fallback", "declined", "cold"}:
        troubles.append(f"no reuse: {receipt.outcome} ({receipt.reason})")
    elif must_reuse and receipt.reused_tokens == 0:
        troubles.append("no token was reused")
    if must_shift and not any(chunk.reused and chunk.shift for chunk in receipt.chunks):
        troubles.append("no reused chunk had moved")
    if not found.kl <= limit:
        troubles.append(f"KL to dense is {found.kl:.2e}, above {limit:.0e}")
    seen = (
        f"{receipt.reused_tokens} of {receipt.prompt_tokens} tokens reused, "
        f"{receipt.compute_fraction:.1%} computed, KL to dense {found.kl:.1e}"
    )
    return Finding(
        name,
        not troubles,
        found.kl,
        receipt.reused_tokens,
        receipt.prompt_tokens,
        "; ".join(troubles) or seen,
    )
