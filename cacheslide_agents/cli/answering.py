"""Asks a backend one prompt and shows what it did.

In: chunked prompts. Out: answers, written piece by piece while they come, with their receipts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, cast

from cacheslide_agents.backend import (
    Backend,
    FinishReason,
    GenerationChunk,
    GenerationRequest,
    PolicyLike,
    Receipt,
    Sampling,
)
from cacheslide_agents.chunks import ChunkedPrompt
from cacheslide_agents.errors import BackendError
from cacheslide_agents.prompt.chat import ChatEncoder


@dataclass(frozen=True, slots=True)
class Answer:
    """`tokens` counts the new tokens."""

    text: str
    tokens: int
    finish_reason: FinishReason
    receipt: Receipt

    def to_dict(self) -> dict[str, Any]:
        return {
            "text": self.text,
            "finish_reason": self.finish_reason,
            "output_tokens": self.tokens,
            "receipt": self.receipt.to_dict(),
        }


@dataclass(frozen=True)
class Asker:
    """Asks under one policy and in one namespace. `policy=None` takes the backend's default."""

    backend: Backend
    sampling: Sampling = field(default_factory=Sampling)
    policy: PolicyLike | None = None
    namespace: str = "default"
    encoder: ChatEncoder = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "encoder", ChatEncoder(self.backend.tokenizer))

    def ask(self, prompt: ChunkedPrompt, write: Callable[[str], None] | None = None) -> Answer:
        """The whole answer; `write` gets its pieces. Interrupting stops the backend."""
        encoded = self.encoder.encode(prompt)
        request = GenerationRequest(
            prompt_ids=encoded.ids,
            spans=encoded.spans,
            namespace=self.namespace,
            task=encoded.task,
            sampling=self.sampling,
            policy=self.policy,
        )
        texts, tokens = [], 0
        last: GenerationChunk | None = None
        stream = cast("Generator[GenerationChunk, None, None]", self.backend.generate(request))
        with closing(stream) as chunks:
            for last in chunks:
                texts.append(last.text)
                tokens += len(last.token_ids)
                if write is not None:
                    write(last.text)
        if last is None or last.finish_reason is None or last.receipt is None:
            raise BackendError(f"{self.backend.model_id}: an answer ended without a receipt")
        return Answer("".join(texts), tokens, last.finish_reason, last.receipt)


def write_piece(text: str) -> None:
    """Show a piece of an answer at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def receipt_line(receipt: Receipt) -> str:
    """One line: what was reused, what was computed, how long the first token took."""
    return (
        f"{verdict(receipt)}, "
        f"{receipt.reused_tokens} of {receipt.prompt_tokens} prompt tokens reused, "
        f"{receipt.compute_fraction:.1%} computed, first token after {receipt.ttft_s:.3f} s"
    )


def verdict(receipt: Receipt) -> str:
    """The policy and what came of it, with the reason where that says more."""
    why = f" ({receipt.reason})" if receipt.reason not in ("", receipt.outcome) else ""
    return f"{receipt.policy}: {receipt.outcome}{why}"


def policy_named(name: str | None) -> PolicyLike | None:
    """`None` leaves the choice to the backend."""
    if name is None:
        return None
    # Policies import torch, which `cacheslide --help` should not wait for.
    from cacheslide_agents.policies import named

    return named(name)
