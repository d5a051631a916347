"""The embedded backend: transformers decoders on CPU or CUDA, in this process.

In: `GenerationRequest`s from any thread. Out: streamed chunks with a receipt, or scores. Requests
queue; one worker thread answers them in order.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import replace
from threading import Lock
from time import perf_counter
from typing import Any, cast

import numpy as np
import torch

from cacheslide_agents.backend import (
    GenerationChunk,
    GenerationRequest,
    PolicyLike,
    Receipt,
    Scores,
)
from cacheslide_agents.errors import ContextOverflowError, ModelLoadError, RequestError
from cacheslide_agents.pages.base import PageStore
from cacheslide_agents.pages.store import MemoryStore
from cacheslide_agents.policies import CacheSlide
from cacheslide_agents.policies.base import Policy, Population
from cacheslide_agents.policies.cost import CostModel
from cacheslide_agents.position.rotary import Rotary
from torch_cacheslide.attention import ATTENTION_NAME, register_attention
from torch_cacheslide.decode import decode
from torch_cacheslide.engine import Engine, Job
from torch_cacheslide.models import load_model
from torch_cacheslide.runtime import Prompted, Runtime
from torch_cacheslide.sampling import Sampler
from torch_cacheslide.stack import DecoderStack
from torch_cacheslide.text import TextStream

GIB = 1 << 30
MOST_THREADS = 1024
"""OpenMP ends the process when it cannot start as many threads as it was told to."""


class TorchBackend:
    """Answers prompts with a transformers decoder of the Llama, Mistral, Qwen2 or Qwen3 family.

    `model` is a local folder, a hub id or an alias (`smollm2-135m`). `device` defaults to CUDA
    where there is one; `dtype` to float32 on the CPU and bfloat16 on CUDA. `store_bytes` bounds its
    own page store; a `store` that is given stays the giver's, and `close` leaves it as it is.
    `threads` sets torch's intra-op threads for the whole process.
    """

    def __init__(
        self,
        model: str = "smollm2-135m",
        *,
        device: str | None = None,
        dtype: str | torch.dtype | None = None,
        threads: int | None = None,
        policy: Policy | None = None,
        store: PageStore | None = None,
        store_bytes: int = 4 * GIB,
    ) -> None:
        if threads is not None:
            _set_threads(threads)
        register_attention()
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        dtype = dtype or (torch.bfloat16 if str(device).startswith("cuda") else torch.float32)
        loaded = load_model(model, device=device, dtype=dtype, attn_implementation=ATTENTION_NAME)
        config = loaded.model.config
        stack = DecoderStack(loaded.model)
        self.tokenizer: Any = loaded.tokenizer
        self.model_id: str = loaded.model_id
        self.path = loaded.path
        self.fingerprint: str = loaded.fingerprint
        self.layers: int = stack.layers
        self.device = stack.device
        self.max_model_len = int(config.max_position_embeddings)
        self.store: PageStore = store if store is not None else MemoryStore(store_bytes)
        self._owns_store = store is None
        self._vocabulary = int(config.vocab_size)
        self._eos = _eos_ids(loaded.model, loaded.tokenizer)
        self._policy: Policy = policy if policy is not None else CacheSlide()
        cost = CostModel.from_config(config)
        rotary = Rotary.from_config(config)
        self._runtime = Runtime(stack, rotary, self.store, cost, loaded.fingerprint)
        self._engine = Engine(f"cacheslide-{self.model_id}")
        self._counts: dict[str, float] = {}
        self._counts_lock = Lock()

    def generate(self, request: GenerationRequest) -> Iterator[GenerationChunk]:
        """Stream the answer. Closing the iterator cancels after the prefill or token under way."""
        self._check(request)
        return self._engine.stream(lambda job: self._answer(request, job))

    def agenerate(self, request: GenerationRequest) -> AsyncIterator[GenerationChunk]:
        """The same for asyncio; cancelling the task cancels the request."""
        self._check(request)
        return self._engine.astream(lambda job: self._answer(request, job))

    def score(self, request: GenerationRequest, continuation_ids: Sequence[int]) -> Scores:
        """Log-probabilities of every vocabulary entry before each continuation token."""
        self._check(request, room=self._check_ids("continuation_ids", continuation_ids))
        (scores,) = self._engine.stream(lambda job: self._score(request, continuation_ids, job))
        return cast(Scores, scores)

    def warm(self, request: GenerationRequest) -> None:
        """Fill the store with what the policy will look for when a prompt like this one comes."""
        self._check(request)
        list(self._engine.stream(lambda _: self._warm(request)))

    def pin(self, session: str) -> None:
        self.store.pin(session)

    def release(self, session: str) -> None:
        self.store.unpin(session)

    def refresh(self, session: str) -> None:
        """A hint this backend does not act on yet: the next dense turn refreshes."""

    def metrics(self) -> Mapping[str, float]:
        with self._counts_lock:
            return {**self._counts, **self.store.metrics()}

    def close(self) -> None:
        self._engine.close()
        if self._owns_store:
            self.store.clear()

    def _answer(self, request: GenerationRequest, job: Job) -> None:
        queued = perf_counter()
        limit = min(request.sampling.max_tokens, self.max_model_len - len(request.prompt_ids))
        with torch.inference_mode():
            prompted = self._runtime.prefill(request, self._policy_of(request), limit)
            continuation = prompted.continuation(self._runtime)
            steps = decode(
                prompted.prefilled.logits[-1],
                continuation,
                Sampler(request.sampling),
                TextStream(
                    self.tokenizer,
                    request.sampling.stop,
                    request.sampling.stop_token_ids,
                    () if request.sampling.ignore_eos else self._eos,
                ),
                max_tokens=limit,
                cancelled=job.cancelled.is_set,
            )
            receipt: Receipt | None = None
            for step in steps:
                receipt = receipt or self._timed(prompted, job, queued)
                last = receipt if step.finish_reason else None
                ids, reason = (step.token,), step.finish_reason
                job.emit(GenerationChunk(0, step.text, ids, None, reason, last))
            if request.retain:
                self._runtime.remember(prompted, continuation.tokens)
        self._count(prompted.receipt)

    def _score(self, request: GenerationRequest, continuation: Sequence[int], job: Job) -> None:
        queued = perf_counter()
        with torch.inference_mode():
            prompted = self._runtime.prefill(request, self._policy_of(request), len(continuation))
            receipt = self._timed(prompted, job, queued)
            logits = prompted.prefilled.logits
            if len(continuation) > 1:
                more = prompted.continuation(self._runtime).append(list(continuation[:-1]))
                logits = torch.cat([logits, more])
            logprobs = torch.log_softmax(logits, dim=-1).float().cpu().numpy()
        self._count(prompted.receipt)
        job.emit(Scores(logprobs, receipt))

    def _warm(self, request: GenerationRequest) -> None:
        policy = self._policy_of(request)
        with torch.inference_mode():
            if policy.population is Population.ISOLATED:
                self._runtime.populate_chunks(request, policy)
            elif policy.population is Population.CONTEXT:
                self._runtime.remember(self._runtime.prefill(request, policy, room=0), [])

    def _timed(self, prompted: Prompted, job: Job, queued: float) -> Receipt:
        return replace(
            prompted.receipt,
            ttft_s=perf_counter() - job.submitted,
            queue_s=queued - job.submitted,
        )

    def _policy_of(self, request: GenerationRequest) -> Policy:
        policy: PolicyLike = request.policy if request.policy is not None else self._policy
        if not isinstance(policy, Policy):
            raise RequestError(f"policy {policy!r} is not one; see cacheslide_agents.policies")
        return policy

    def _check(self, request: GenerationRequest, room: int = 1) -> None:
        count = self._check_ids("prompt_ids", request.prompt_ids)
        if count + room > self.max_model_len:
            raise ContextOverflowError(count, self.max_model_len, room)
        if request.grammar is not None:
            raise RequestError("grammar-constrained decoding is not built yet; leave grammar unset")

    def _check_ids(self, name: str, ids: Sequence[int]) -> int:
        """How many they are. Numbers that are not whole would be cut off without a word."""
        try:
            array = np.asarray(ids)
        except ValueError:  # rows of different lengths
            array = np.array(None)
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iuO"):
            raise RequestError(f"{name} must be one flat sequence of integer token ids")
        if not array.size:
            raise RequestError(f"{name} is empty; give at least one token")
        if array.dtype.kind == "O" and not all(isinstance(each, int) for each in ids):
            raise RequestError(f"{name} must be one flat sequence of integer token ids")
        low, high = array.min(), array.max()
        if low < 0 or high >= self._vocabulary:
            raise RequestError(
                f"{name} holds {low if low < 0 else high}, outside the vocabulary of "
                f"{self._vocabulary}; is this the model's own tokenizer?"
            )
        return len(array)

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


def _eos_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Every id the model or its tokenizer calls the end."""
    declared = model.generation_config.eos_token_id
    ids = declared if isinstance(declared, list) else [declared]
    ends = [id_ for id_ in (*ids, tokenizer.eos_token_id) if id_ is not None]
    if not all(isinstance(id_, int) for id_ in ends):
        raise ModelLoadError(
            f"generation_config.json: eos_token_id={declared!r} must be a token id or a list of "
            "them; fetch the file again"
        )
    return tuple(set(ends))


def _set_threads(threads: int) -> None:
    if not isinstance(threads, int) or not 1 <= threads <= MOST_THREADS:
        raise RequestError(f"threads={threads!r} must be a whole number from 1 to {MOST_THREADS}")
    torch.set_num_threads(threads)
