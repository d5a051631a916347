"""A backend that plays a script: known times, known distributions, known receipts, no model.

In: requests under policies. Out: what the script says of that policy; the clock moves by its times.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cacheslide_agents.backend import GenerationChunk, GenerationRequest, Outcome, Receipt, Scores
from cacheslide_agents.chunks import ChunkedPrompt, EncodedPrompt, Span

ENCODE_SECONDS = 0.125
WARM_SECONDS = 2.0
TOKEN_SECONDS = 0.25


@dataclass
class Script:
    """What one policy does: seconds to the first token, its receipt, its distribution."""

    seconds: float = 1.0
    outcome: Outcome = "hit"
    reused: int = 0
    probabilities: tuple[float, ...] = (0.5, 0.5)
    score_outcome: Outcome | None = None


@dataclass
class ScriptedBackend:
    """`answer` is generated word by word under every policy; `calls` remembers every request."""

    scripts: Mapping[str, Script] = field(default_factory=dict)
    answer: str = "John Ford\nbecause he did"
    model_id: str = "scripted"
    max_model_len: int = 8192
    tokenizer: Any = None
    now: float = 0.0
    written: int = 0
    calls: list[tuple[str, GenerationRequest]] = field(default_factory=list)
    scored: list[Sequence[int]] = field(default_factory=list)

    def clock(self) -> float:
        return self.now

    def encode(self, prompt: ChunkedPrompt) -> EncodedPrompt:
        """One token a character."""
        self.now += ENCODE_SECONDS
        spans, text = [], ""
        for chunk in prompt.chunks():
            stop = len(text) + len(chunk.text)
            spans.append(Span(chunk.id, chunk.role, len(text), stop, chunk.digest))
            text += chunk.text
        return EncodedPrompt(tuple(map(ord, text)), tuple(spans), text, prompt.task)

    def generate(self, request: GenerationRequest) -> Generator[GenerationChunk, None, None]:
        self.calls.append(("generate", request))
        self.now += self._script(request).seconds
        words = self.answer.split(" ")[: request.sampling.max_tokens]
        for index, word in enumerate(words):
            last = index == len(words) - 1
            receipt = self._receipt(request, self._script(request).outcome) if last else None
            text = word if index == 0 else f" {word}"
            yield GenerationChunk(0, text, (index,), None, "length" if last else None, receipt)
            self.now += TOKEN_SECONDS

    async def agenerate(self, request: GenerationRequest) -> AsyncGenerator[GenerationChunk, None]:
        for chunk in self.generate(request):
            yield chunk

    def score(self, request: GenerationRequest, continuation_ids: Sequence[int]) -> Scores:
        self.calls.append(("score", request))
        self.scored.append(tuple(continuation_ids))
        script = self._script(request)
        row = np.log(np.array(script.probabilities, dtype=np.float32))
        receipt = self._receipt(request, script.score_outcome or script.outcome)
        return Scores(np.tile(row, (len(continuation_ids), 1)), receipt)

    def warm(self, request: GenerationRequest) -> None:
        self.calls.append(("warm", request))
        self.now += WARM_SECONDS
        self.written += 100

    def pin(self, session: str, namespace: str = "default") -> None: ...
    def release(self, session: str, namespace: str = "default") -> None: ...
    def refresh(self, session: str, namespace: str = "default") -> None: ...

    def metrics(self) -> Mapping[str, float]:
        return {"memory_write_bytes": float(self.written)}

    def close(self) -> None: ...

    def asked(self, kind: str) -> list[str]:
        """The policies of all requests of `kind`, in order."""
        return [_policy(request) for what, request in self.calls if what == kind]

    def _script(self, request: GenerationRequest) -> Script:
        return self.scripts.get(_policy(request), Script())

    def _receipt(self, request: GenerationRequest, outcome: Outcome) -> Receipt:
        total, reused = len(request.prompt_ids), self._script(request).reused
        return Receipt(
            request_id=request.request_id,
            policy=_policy(request),
            outcome=outcome,
            reason=f"scripted {outcome}",
            prompt_tokens=total,
            reused_tokens=reused,
            active_tokens=total - reused,
            compute_fraction=(total - reused) / total,
            exact=not reused,
            ttft_s=self._script(request).seconds,
            peak_kv_bytes=4096,
        )


def _policy(request: GenerationRequest) -> str:
    return "none" if request.policy is None else request.policy.name
