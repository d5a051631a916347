"""What the worker does for a request: prefill it, then answer, score, or only remember.

In: requests, and the job to tell. Out: chunks with receipts, scores, stored contexts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from threading import Lock
from time import perf_counter

import torch

from cacheslide_agents.backend import GenerationRequest, Receipt, Scores
from cacheslide_agents.policies.base import Policy, Population
from cacheslide_agents.policies.checks import policy_of
from torch_cacheslide.grammar import Constraint
from torch_cacheslide.idle import IdleWork
from torch_cacheslide.jobs import Job
from torch_cacheslide.prompted import Prompted
from torch_cacheslide.runtime import Runtime
from torch_cacheslide.writing import Writer


@dataclass(frozen=True)
class Answering:
    """`policy` is for requests that name none; prompt and answer together have `window` tokens."""

    runtime: Runtime
    writer: Writer
    idle: IdleWork
    policy: Policy
    window: int
    _counts: dict[str, float] = field(default_factory=dict)
    _counts_lock: Lock = field(default_factory=Lock)

    def answer(self, request: GenerationRequest, start: Constraint | None, job: Job) -> None:
        queued = perf_counter()
        limit = min(request.sampling.max_tokens, self.window - len(request.prompt_ids))
        decoding = self.writer.decoding(request, start, limit)
        with self.prefilled(request, limit * decoding.width) as prompted:
            growth = self.runtime.growth(prompted, decoding.width)
            receipt: Receipt | None = None
            for step in decoding.steps(prompted.prefilled.logits[-1], growth, job.cancelled.is_set):
                receipt = receipt or _timed(prompted, job, queued)
                job.emit(step.chunk(receipt))
            if request.retain:
                self.runtime.remember(prompted, growth.keep(decoding.tip))
        self._count(prompted.receipt)

    def score(self, request: GenerationRequest, continuation: Sequence[int], job: Job) -> None:
        queued = perf_counter()
        with self.prefilled(request, len(continuation)) as prompted:
            receipt = _timed(prompted, job, queued)
            logits = prompted.prefilled.logits
            if len(continuation) > 1:
                more = self.runtime.continuation(prompted).append(list(continuation[:-1]))
                logits = torch.cat([logits, more])
            logprobs = torch.log_softmax(logits, dim=-1).float().cpu().numpy()
        self._count(prompted.receipt)
        job.emit(Scores(logprobs, receipt))

    def warm(self, request: GenerationRequest) -> None:
        policy = policy_of(request, self.policy)
        if policy.population is Population.ISOLATED:
            with torch.inference_mode():
                self.runtime.populate_chunks(request, policy)
        elif policy.population is Population.CONTEXT:
            with self.prefilled(request, room=0) as prompted:
                self.runtime.remember(prompted, [])

    def metrics(self) -> Mapping[str, float]:
        with self._counts_lock:
            return dict(self._counts)

    @contextmanager
    def prefilled(self, request: GenerationRequest, room: int) -> Iterator[Prompted]:
        """Its prompt, prefilled; what it reuses is held until the end of the block."""
        policy = policy_of(request, self.policy)
        with torch.inference_mode(), self.runtime.prefill(request, policy, room) as prompted:
            self.idle.after(prompted)
            yield prompted

    def _count(self, receipt: Receipt) -> None:
        with self._counts_lock:
            for name, value in {
                "requests": 1,
                f"outcome_{receipt.outcome}": 1,
                "prompt_tokens": receipt.prompt_tokens,
                "reused_tokens": receipt.reused_tokens,
                "active_tokens": receipt.active_tokens,
            }.items():
                self._counts[name] = self._counts.get(name, 0) + value


def _timed(prompted: Prompted, job: Job, queued: float) -> Receipt:
    return replace(
        prompted.receipt, ttft_s=perf_counter() - job.submitted, queue_s=queued - job.submitted
    )
