"""How the answers of a request are made: from its sampling and grammar to what decodes it.

In: a request. Out: where it starts in its grammar, made before it queues, so that nobody else waits
for the grammar's compilation and one that cannot be used costs nothing but its error; and its
`Decoding`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import Protocol

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from cacheslide_agents.backend import GenerationRequest
from torch_cacheslide.answers import Answer, Answers, Step
from torch_cacheslide.beams import Beam, BeamSearch
from torch_cacheslide.decode import Growth
from torch_cacheslide.grammar import Constraint, Grammars
from torch_cacheslide.processors import Processor, RepetitionPenalty
from torch_cacheslide.sampling import Sampler
from torch_cacheslide.text import TextStream


class Decoding(Protocol):
    """`width`: answers in flight at most. `tip`: last row of the one that is kept for later."""

    @property
    def width(self) -> int: ...
    @property
    def tip(self) -> int: ...

    def steps(
        self, logits: Tensor, growth: Growth, cancelled: Callable[[], bool]
    ) -> Iterator[Step]: ...


class Writer:
    """Makes decodings with the tokenizer and the end tokens of one model.

    `vocabulary` is the width of its logits.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, vocabulary: int, ends: Collection[int]
    ) -> None:
        self._tokenizer, self._ends = tokenizer, ends
        self._grammars = Grammars(tokenizer, vocabulary, ends)

    def start(self, request: GenerationRequest) -> Constraint | None:
        """Where its answers start in its grammar, compiled if need be; for use by any thread.

        Raises as `Grammars.constraint`.
        """
        return None if request.grammar is None else self._grammars.constraint(request.grammar)

    def decoding(
        self, request: GenerationRequest, start: Constraint | None, limit: int
    ) -> Decoding:
        """Answers of at most `limit` tokens, each from `start` on."""
        sampling = request.sampling
        if sampling.num_beams == 1:
            return Answers([self._answer(request, start, n, limit) for n in range(sampling.n)])
        tip, stream = len(request.prompt_ids) - 1, self._stream(request)
        first = Beam(tip, stream, _processors(request, start))
        ends = 0 if sampling.ignore_eos else len(self._ends)
        ends += len(sampling.stop_token_ids)
        return BeamSearch(first, sampling, ends=ends, max_tokens=limit)

    def _answer(
        self, request: GenerationRequest, start: Constraint | None, index: int, limit: int
    ) -> Answer:
        """Answer `index` draws what a request of its own with `seed + index` would draw."""
        sampling = request.sampling
        if sampling.seed is not None:
            sampling = replace(sampling, seed=sampling.seed + index)
        return Answer(
            index,
            Sampler(sampling),
            self._stream(request),
            processors=_processors(request, start),
            logprobs=sampling.logprobs,
            max_tokens=limit,
            tip=len(request.prompt_ids) - 1,
        )

    def _stream(self, request: GenerationRequest) -> TextStream:
        """Where a grammar ends, only an end token is allowed: it ends the answer in any case."""
        sampling = request.sampling
        endless = sampling.ignore_eos and request.grammar is None
        ends = () if endless else self._ends
        return TextStream(self._tokenizer, sampling.stop, sampling.stop_token_ids, ends)


def _processors(request: GenerationRequest, start: Constraint | None) -> list[Processor]:
    processors: list[Processor] = []
    penalty = request.sampling.repetition_penalty
    if penalty != 1.0:
        processors.append(RepetitionPenalty(penalty, request.prompt_ids))
    if start is not None:
        processors.append(start.fork())
    return processors
