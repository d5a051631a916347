"""Our sampling and grammars in vLLM's words, and vLLM's answers in ours.

In: sampling and a grammar. Out: `SamplingParams`; back: `GenerationChunk`s, or rows of scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm import RequestOutput, SamplingParams
from vllm.logprobs import Logprob
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from cacheslide_agents.backend import (
    FinishReason,
    GenerationChunk,
    Grammar,
    Receipt,
    Sampling,
    TokenLogprob,
)
from cacheslide_agents.errors import BackendError, RequestError

_ENDS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "cancelled"}
_GRAMMARS = {
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
    "structural_tag": "structural_tag",
}
_SAME = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "seed",
    "ignore_eos",
    "n",
    "logprobs",
)


def sampling_params(
    sampling: Sampling, grammar: Grammar | None, room: int, extra: Mapping[str, Any]
) -> SamplingParams:
    """`room`: tokens the window still holds. `extra` travels to the engine unchanged.

    Raises `RequestError` for beam search, which vLLM runs as many requests of one token each, and
    for what vLLM refuses.
    """
    if sampling.num_beams > 1:
        raise RequestError(
            f"num_beams={sampling.num_beams}: the vLLM backend samples; use the torch backend for "
            "beam search, or n answers"
        )
    given = asdict(sampling)
    try:
        return SamplingParams(
            **{name: given[name] for name in _SAME},
            max_tokens=min(sampling.max_tokens, room),
            stop=list(sampling.stop),
            stop_token_ids=list(sampling.stop_token_ids),
            structured_outputs=None if grammar is None else _structured(grammar),
            output_kind=RequestOutputKind.DELTA,
            extra_args=dict(extra),
        )
    except Exception as error:
        raise RequestError(f"vLLM refuses the request: {error}") from error


def chunks_of(
    output: RequestOutput, alternatives: int | None, receipt: Callable[[], Receipt]
) -> Iterator[GenerationChunk]:
    """What is new of each answer, with `alternatives` per token; `receipt` is asked at its end.

    `BackendError` where vLLM gave up.
    """
    for answer in output.outputs:
        ids = tuple(answer.token_ids)
        logprobs = None
        if alternatives is not None and answer.logprobs is not None:
            logprobs = _token_logprobs(ids, answer.logprobs, alternatives)
        chunk = GenerationChunk(answer.index, answer.text, ids, logprobs)
        if answer.finish_reason is not None:
            reason = _finish_reason(answer.finish_reason)
            chunk = replace(chunk, finish_reason=reason, receipt=receipt())
        yield chunk


def _token_logprobs(
    token_ids: Sequence[int], positions: Sequence[Mapping[int, Logprob] | None], alternatives: int
) -> tuple[TokenLogprob, ...]:
    """`positions` hold, per token, the token itself and the most likely ones."""
    told = []
    for token, position in zip(token_ids, positions, strict=True):
        assert position is not None
        ranked = sorted(position.items(), key=lambda item: -item[1].logprob)
        top = tuple((id_, each.logprob) for id_, each in ranked[:alternatives])
        told.append(TokenLogprob(token, position[token].logprob, top))
    return tuple(told)


def score_rows(flat: Any, vocabulary: int) -> list[npt.NDArray[np.float32]]:
    """One row [vocabulary] per position of vLLM's flat log-probabilities."""
    rows = []
    for start, stop in zip(flat.start_indices, flat.end_indices, strict=True):
        row = np.full(vocabulary, -np.inf, dtype=np.float32)
        row[flat.token_ids[start:stop]] = flat.logprobs[start:stop]
        rows.append(row)
    return rows


def _structured(grammar: Grammar) -> StructuredOutputsParams:
    if grammar.kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    return StructuredOutputsParams(**{_GRAMMARS[grammar.kind]: grammar.source})


def _finish_reason(told: str) -> FinishReason:
    if told not in _ENDS:
        raise BackendError(f"vLLM ended the request with {told!r}")
    return _ENDS[told]
