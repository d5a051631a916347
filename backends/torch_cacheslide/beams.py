"""Beam search: the likeliest answers, found by going on with the likeliest beginnings.

In: the logits after the prompt. Out: the steps of the best answers, once the search is over. Beams
share the prompt's rows, and those of the beginning they have in common.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from sys import float_info

import torch
from torch import Tensor

from cacheslide_agents.backend import FinishReason
from cacheslide_agents.sampling import Sampling
from torch_cacheslide.answers import Step
from torch_cacheslide.decode import Growth
from torch_cacheslide.logprobs import token_logprob
from torch_cacheslide.processors import Processor
from torch_cacheslide.sampling import check_best
from torch_cacheslide.text import TextStream


@dataclass(frozen=True)
class Beam:
    """The beginning of an answer. `score` is its summed log-probability after the processors.

    `tip` is the row of its last token that has keys and values; at first, the prompt's last.
    """

    tip: int
    stream: TextStream
    processors: Sequence[Processor] = ()
    score: float = 0.0
    steps: tuple[Step, ...] = ()

    @property
    def ended(self) -> bool:
        return bool(self.steps) and self.steps[-1].finish_reason is not None

    def scores(self, logits: Tensor) -> Tensor:
        """[vocabulary]: what the beam's score becomes with each next token."""
        check_best(logits.max())
        logprobs = torch.log_softmax(logits, dim=-1)
        for processor in self.processors:
            logprobs = processor.apply(logprobs)
        return logprobs + self.score

    def extended(self, token: int, score: float) -> Beam:
        """With `token`, which may end it."""
        stream = self.stream.fork()
        text, stopped = stream.push(token)
        step = Step(0, token, text, finish_reason="stop" if stopped else None)
        return replace(self, stream=stream, score=score, steps=(*self.steps, step))

    def closed(self, reason: FinishReason) -> Beam:
        """Ended by a limit, unless it had ended before."""
        if self.ended:
            return self
        last = self.steps[-1]
        last = replace(last, text=last.text + self.stream.flush(), finish_reason=reason)
        return replace(self, steps=(*self.steps[:-1], last))

    def grown(self, tip: int) -> Beam:
        """Its last token has row `tip` now, and its own processors have seen it."""
        processors = [processor.fork() for processor in self.processors]
        for processor in processors:
            processor.accept(self.steps[-1].token)
        return replace(self, tip=tip, processors=processors)


class BeamSearch:
    """The `n` best of `num_beams` answers, as transformers finds them with `early_stopping=False`.

    Every step ranks the likeliest extensions of all beams, `num_beams` times one more than there
    are end tokens (`ends`). Those among the first `num_beams` that end are answers, ranked by
    score / length ** `length_penalty`, and the best `num_beams` answers are kept; the best
    extensions that do not end go on. The search is over at the limit, or when all answers are there
    and the best beam, if it ended now, would not be better than the worst of them. A grammar that
    matches few texts gives fewer answers. Temperature, filters and seed play no part.
    """

    def __init__(self, first: Beam, sampling: Sampling, *, ends: int, max_tokens: int) -> None:
        self._first, self._sampling, self._max_tokens = first, sampling, max_tokens
        self._ranked = max(2, 1 + ends) * sampling.num_beams
        self.width = sampling.num_beams
        self.tip = first.tip

    def steps(
        self, logits: Tensor, growth: Growth, cancelled: Callable[[], bool]
    ) -> Iterator[Step]:
        """`logits` [vocabulary] of the prompt. Answers come one after another, the best first."""
        best = self._search(logits, growth, cancelled)[: self._sampling.n]
        self.tip = best[0].tip
        for index, beam in enumerate(best):
            for step in beam.steps:
                yield replace(step, index=index)

    def _search(self, logits: Tensor, growth: Growth, cancelled: Callable[[], bool]) -> list[Beam]:
        live, rows = [self._first], logits[None]
        answers: list[Beam] = []
        for length in range(1, self._max_tokens + 1):
            found = self._extensions(live, rows)
            if length == self._max_tokens:
                found = [beam.closed("length") for beam in found]
            elif cancelled():
                found = [beam.closed("cancelled") for beam in found]
            ended = [beam for beam in found[: self.width] if beam.ended]
            answers = sorted([*answers, *ended], key=self._merit, reverse=True)[: self.width]
            live = [beam for beam in found if not beam.ended][: self.width]
            if not live or self._settled(live[0], answers):
                break
            tokens = [beam.steps[-1].token for beam in live]
            rows, tips = growth.grow(tokens, [beam.tip for beam in live])
            live = [beam.grown(tip) for beam, tip in zip(live, tips, strict=True)]
        return answers

    def _extensions(self, live: Sequence[Beam], rows: Tensor) -> list[Beam]:
        """The likeliest extensions of beams [b] with logits `rows` [b, vocabulary], best first."""
        scores = torch.stack([beam.scores(row) for beam, row in zip(live, rows, strict=True)])
        likely = scores.flatten().topk(min(self._ranked, scores.numel()))
        found = []
        for place, score in zip(likely.indices.tolist(), likely.values.tolist(), strict=True):
            parent, token = divmod(place, scores.shape[1])
            if score == -torch.inf:  # a grammar leaves no more
                break
            beam = live[parent].extended(token, score)
            found.append(self._told(beam, rows[parent]))
        return found

    def _told(self, beam: Beam, logits: Tensor) -> Beam:
        if self._sampling.logprobs is None:
            return beam
        last = beam.steps[-1]
        told = token_logprob(logits, last.token, self._sampling.logprobs)
        return replace(beam, steps=(*beam.steps[:-1], replace(last, logprob=told)))

    def _merit(self, beam: Beam) -> tuple[float, float]:
        """Orders beams as score / length ** `length_penalty` does, whatever the penalty: in
        logarithms, for the power itself may be too large or too small for a number."""
        weight = self._sampling.length_penalty * math.log(len(beam.steps))
        return weight - math.log(max(-beam.score, float_info.min)), beam.score

    def _settled(self, best: Beam, answers: Sequence[Beam]) -> bool:
        full = len(answers) == self.width
        return full and self._merit(best) <= self._merit(answers[-1])
