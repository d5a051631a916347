"""Asks a backend one prompt and shows what it did.

In: chunked prompts. Out: answers, written piece by piece while they come, with their receipts.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

from cacheslide_agents.answered import Answered, answered
from cacheslide_agents.backend import Backend, GenerationRequest, PolicyLike, Receipt, Sampling
from cacheslide_agents.chunks import ChunkedPrompt
from cacheslide_agents.prompt.chat import ChatEncoder


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

    def ask(self, prompt: ChunkedPrompt, *, shown: bool = False) -> Answered:
        """The whole answer; `shown`: on stdout as it comes. Interrupting stops the backend."""
        request = GenerationRequest.of(
            self.encoder.encode(prompt),
            namespace=self.namespace,
            sampling=self.sampling,
            policy=self.policy,
        )
        return answered(self.backend, request, write=write_piece if shown else None)


def to_dict(answer: Answered) -> dict[str, Any]:
    """Plain JSON values."""
    return {
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "output_tokens": len(answer.token_ids),
        "receipt": answer.receipt.to_dict(),
    }


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
