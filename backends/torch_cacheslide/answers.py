"""Answers in the making: which token comes next, what text it completes, and when to end.

In: the logits after the prompt or after an answer's last token. Out: `Step`s, one token of every
unfinished answer in turn; each becomes one streamed chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from cacheslide_agents.backend import FinishReason, GenerationChunk, Receipt
from cacheslide_agents.sampling import TokenLogprob
from torch_cacheslide.decode import Growth
from torch_cacheslide.logprobs import token_logprob
from torch_cacheslide.processors import Processor
from torch_cacheslide.sampling import Sampler
from torch_cacheslide.text import TextStream


@dataclass(frozen=True, slots=True)
class Step:
    """One generated token of answer `index`. `text` is what became certain with it.

    The last step of an answer has a reason and the text that was held back.
    """

    index: int
    token: int
    text: str
    logprob: TokenLogprob | None = None
    finish_reason: FinishReason | None = None

    def chunk(self, receipt: Receipt) -> GenerationChunk:
        """What the consumer gets; the receipt comes with an answer's last token."""
        told = None if self.logprob is None else (self.logprob,)
        last = None if self.finish_reason is None else receipt
        return GenerationChunk(self.index, self.text, (self.token,), told, self.finish_reason, last)


class Answer:
    """Chooses tokens by `processors`, then `sampler`, until the stream or `max_tokens` ends it.

    `logprobs` is the number of alternatives to report per token; `None` reports nothing. `tip` is
    the row of its last token that has keys and values; at first, the prompt's last.
    """

    def __init__(
        self,
        index: int,
        sampler: Sampler,
        stream: TextStream,
        *,
        processors: Sequence[Processor] = (),
        logprobs: int | None = None,
        max_tokens: int,
        tip: int,
    ) -> None:
        self.index, self.tip = index, tip
        self._sampler, self._stream, self._processors = sampler, stream, tuple(processors)
        self._logprobs, self._left = logprobs, max_tokens
        self.finished = False

    def take(self, logits: Tensor, cancelled: Callable[[], bool]) -> Step:
        """The next token of this answer from its `logits` [vocabulary]."""
        allowed = logits
        for processor in self._processors:
            allowed = processor.apply(allowed)
        token = self._sampler.next_token(allowed)
        for processor in self._processors:
            processor.accept(token)
        told = None if self._logprobs is None else token_logprob(logits, token, self._logprobs)
        text, reason = self._text(token, cancelled)
        self.finished = reason is not None
        return Step(self.index, token, text, told, reason)

    def _text(self, token: int, cancelled: Callable[[], bool]) -> tuple[str, FinishReason | None]:
        text, stopped = self._stream.push(token)
        self._left -= 1
        if stopped:
            return text, "stop"
        if self._left and not cancelled():
            return text, None
        return text + self._stream.flush(), "cancelled" if self._left else "length"


class Answers:
    """Answers that know nothing of each other, decoded together; the first is kept for later."""

    def __init__(self, answers: Sequence[Answer]) -> None:
        self._answers = tuple(answers)
        self.width = len(self._answers)

    @property
    def tip(self) -> int:
        return self._answers[0].tip

    def steps(
        self, logits: Tensor, growth: Growth, cancelled: Callable[[], bool]
    ) -> Iterator[Step]:
        """`logits` [vocabulary] of the prompt. Every answer ends with a step that has a reason."""
        live, rows = list(self._answers), logits.expand(self.width, -1)
        while True:
            steps = [answer.take(row, cancelled) for answer, row in zip(live, rows, strict=True)]
            yield from steps
            tokens = [step.token for step in steps if step.finish_reason is None]
            live = [answer for answer in live if not answer.finished]
            if not live:
                return
            rows, tips = growth.grow(tokens, [answer.tip for answer in live])
            for answer, tip in zip(live, tips, strict=True):
                answer.tip = tip
