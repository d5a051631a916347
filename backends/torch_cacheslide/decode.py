"""Decoding: one token after another on top of a prefilled working cache.

In: the logits after the prompt, a sampler, a text stream with its stop rules. Out: tokens with the
text they completed, and why it ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cacheslide_agents.backend import FinishReason
from cacheslide_agents.position.rotary import Rotary
from torch_cacheslide.attention import row_layout
from torch_cacheslide.cache import WorkingCache
from torch_cacheslide.sampling import Sampler
from torch_cacheslide.stack import DecoderStack
from torch_cacheslide.text import TextStream


@dataclass(frozen=True, slots=True)
class Step:
    """One generated token. `text` is what became certain with it; the last step has a reason."""

    token: int
    text: str
    finish_reason: FinishReason | None = None


class Continuation:
    """Appends tokens after a prompt of `length` tokens whose next position is `position`.

    `tokens` are those that went through the layers, and so have keys and values.
    """

    def __init__(
        self,
        stack: DecoderStack,
        rotary: Rotary,
        cache: WorkingCache,
        *,
        length: int,
        position: int,
    ) -> None:
        self._stack, self._rotary, self._cache = stack, rotary, cache
        self._row, self._position = length, position
        self.tokens: list[int] = []
        cache.correction = None

    def append(self, tokens: list[int]) -> Tensor:
        """Run `tokens` [t] through the layers; logits [t, vocabulary] after each of them."""
        count, device = len(tokens), self._stack.device
        rows = np.arange(self._row, self._row + count, dtype=np.int64)
        positions = torch.arange(self._position, self._position + count, device=device)
        cos, sin = self._rotary.cos_sin(positions, self._stack.dtype)
        layout = row_layout(rows, device)
        self._cache.set_rows(rows)
        hidden = self._stack.embed(torch.tensor(tokens, device=device))
        for layer in range(self._stack.layers):
            hidden = self._stack.layer(layer, hidden, (cos[None], sin[None]), self._cache, layout)
        self._row += count
        self._position += count
        self.tokens += tokens
        return self._stack.logits(hidden)


def decode(
    logits: Tensor,
    continuation: Continuation,
    sampler: Sampler,
    stream: TextStream,
    *,
    max_tokens: int,
    cancelled: Callable[[], bool],
) -> Iterator[Step]:
    """Yields at least one step; the last one carries the finish reason and the held-back text."""
    for count in range(1, max_tokens + 1):
        token = sampler.next_token(logits)
        text, stopped = stream.push(token)
        if stopped:
            yield Step(token, text, "stop")
            return
        if count == max_tokens or cancelled():
            reason: FinishReason = "length" if count == max_tokens else "cancelled"
            yield Step(token, text + stream.flush(), reason)
            return
        yield Step(token, text)
        logits = continuation.append([token])[-1]
