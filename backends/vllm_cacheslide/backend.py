"""vLLM in this process (or in processes of its own) behind the `Backend` protocol.

In: `GenerationRequest`s from any thread or event loop, many at once. Out: streamed chunks with a
receipt, or scores.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from os import PathLike
from time import perf_counter
from typing import Any, cast

import numpy as np
from vllm import SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.llm_engine import LLMEngine

from cacheslide_agents.backend import (
    GenerationChunk,
    GenerationRequest,
    Receipt,
    Sampling,
    Scores,
    expect_name,
)
from cacheslide_agents.chunks import Role
from cacheslide_agents.errors import BackendError
from cacheslide_agents.pages.limits import GIB
from cacheslide_agents.paths import expanded, short_name
from cacheslide_agents.policies import CacheSlide, Recompute
from cacheslide_agents.policies.base import Policy, Population
from cacheslide_agents.policies.canonical import ProfilePaths, profile_paths
from cacheslide_agents.policies.checks import Checks, policy_of
from vllm_cacheslide.engine import EngineThread
from vllm_cacheslide.forced import FORCED
from vllm_cacheslide.guard import log
from vllm_cacheslide.launch import engine_args
from vllm_cacheslide.params import chunks_of, sampling_params, score_rows
from vllm_cacheslide.receipts import dense_receipt
from vllm_cacheslide.wire import Annotation


class VllmBackend:
    """Answers prompts with a vLLM engine; requests of all callers are batched.

    `model` is a local folder, a hub id or an alias. `store_bytes` bounds the memory of every
    worker's page store. With `store_path`, a folder for this backend alone, contexts outlive the
    engine: what leaves memory, and at `close` all of it, goes there, up to `disk_bytes` for every
    worker. `eviction`, `ttl_s`, the two quotas, `prefetch` and `attention`: see `Settings`.
    `profiles` are files of `cacheslide calibrate`, or folders of them, for a CoPE model. `options`
    are vLLM's `EngineArgs` (`max_model_len`, `enforce_eager`, `tensor_parallel_size`, ...). Where
    the engine runs is vLLM's own choice: with `VLLM_ENABLE_V1_MULTIPROCESSING=0` in this process,
    else in others.
    """

    def __init__(
        self,
        model: str = "smollm2-135m",
        *,
        dtype: str = "auto",
        policy: Policy | None = None,
        store_bytes: int = 4 * GIB,
        store_path: str | PathLike[str] | None = None,
        disk_bytes: int = 64 * GIB,
        eviction: str = "slide",
        ttl_s: float | None = None,
        namespace_quota_bytes: int | None = None,
        tenant_quota_bytes: int | None = None,
        prefetch: int | None = None,
        attention: str = "runs",
        profiles: ProfilePaths = (),
        **options: Any,
    ) -> None:
        extra = {
            "store_bytes": store_bytes,
            "store_path": None if store_path is None else str(expanded(store_path, "store_path")),
            "disk_bytes": disk_bytes,
            "eviction": eviction,
            "ttl_s": ttl_s,
            "namespace_quota_bytes": namespace_quota_bytes,
            "tenant_quota_bytes": tenant_quota_bytes,
            "prefetch": prefetch,
            "attention": attention,
            "profiles": [str(expanded(each, "profiles")) for each in profile_paths(profiles)],
        }
        args = engine_args(model, extra, {"dtype": dtype, **options})
        self._policy: Policy = policy if policy is not None else CacheSlide()
        self.model_id = short_name(model)
        try:
            self._thread = EngineThread(lambda: LLMEngine.from_engine_args(args))
        except Exception as error:
            raise BackendError(
                f"vLLM's engine for {self.model_id} did not start: {error}; its log has the cause"
            ) from error
        try:
            self._ask_engine()
        except BaseException:
            self._thread.close()
            raise

    def _ask_engine(self) -> None:
        """What it has made of model and options."""
        config = self._thread.call(lambda engine: engine.vllm_config.model_config)
        self.tokenizer: Any = self._thread.call(lambda engine: engine.get_tokenizer())
        self.max_model_len = int(config.max_model_len)
        self.layers = int(config.hf_text_config.num_hidden_layers)
        self._checks = Checks(int(config.get_vocab_size()), self.max_model_len)
        self.off: str = self._rpc("cacheslide_off")
        """Why this engine reuses nothing; empty when it does."""

    def generate(self, request: GenerationRequest) -> Generator[GenerationChunk, None, None]:
        """Stream the answer. Closing the iterator aborts the request."""
        policy, params = self._prepared(request)
        return self._chunks(request, policy, params)

    def agenerate(self, request: GenerationRequest) -> AsyncGenerator[GenerationChunk, None]:
        """The same for asyncio; cancelling the task aborts the request."""
        policy, params = self._prepared(request)
        return self._achunks(request, policy, params)

    def score(self, request: GenerationRequest, continuation_ids: Sequence[int]) -> Scores:
        """Log-probabilities of every vocabulary entry before each continuation token."""
        count = self._checks.ids("continuation_ids", continuation_ids)
        policy = policy_of(request, self._policy)
        self._checks.request(request, policy, room=count)
        params = sampling_params(
            Sampling(max_tokens=count, ignore_eos=True),
            None,
            count,
            {**self._extra(request, policy), FORCED: [int(token) for token in continuation_ids]},
        )
        params.logprobs, params.flat_logprobs, params.detokenize = -1, True, False
        started, rows = perf_counter(), []
        ttft_s = 0.0
        for output in self._thread.stream(request.request_id, request.prompt_ids, params):
            ttft_s = ttft_s or perf_counter() - started
            rows += score_rows(output.outputs[0].logprobs, self._checks.vocabulary)
        return Scores(np.stack(rows), self._receipt(request, policy, ttft_s))

    def warm(self, request: GenerationRequest) -> None:
        """Fill the store with what the policy will look for when a prompt like this one comes."""
        policy = policy_of(request, self._policy)
        self._checks.request(request, policy)
        if policy.population is Population.ISOLATED:
            self._warm_chunks(request)
        elif policy.population is Population.CONTEXT:
            one = replace(request, sampling=Sampling(max_tokens=1), grammar=None, retain=True)
            list(self.generate(one))

    def pin(self, session: str, namespace: str = "default") -> None:
        self._pin(session, namespace, True)

    def release(self, session: str, namespace: str = "default") -> None:
        self._pin(session, namespace, False)

    def refresh(self, session: str, namespace: str = "default") -> None:
        """A hint this backend does not act on yet: the next dense turn refreshes."""

    def forget_prefixes(self) -> None:
        """Empty vLLM's own prefix cache; what we have stored stays. No request may be open."""
        self._thread.forget_prefixes()

    def metrics(self) -> Mapping[str, float]:
        return cast(Mapping[str, float], self._rpc("cacheslide_metrics"))

    def close(self) -> None:
        """Write what is stored to SSD, if there is such a tier, and end the engine."""
        try:
            self._rpc("cacheslide_off")  # a step lies between two calls, in which the last is kept
            self._rpc("cacheslide_flush")
        except (BackendError, EngineDeadError):
            pass  # it has ended already, by itself or by an earlier call
        except Exception:
            log.warning("CacheSlide: the last contexts may not be on SSD", exc_info=True)
        finally:
            self._thread.close()

    def _prepared(self, request: GenerationRequest) -> tuple[Policy, SamplingParams]:
        policy = policy_of(request, self._policy)
        self._checks.request(request, policy)
        room = self.max_model_len - len(request.prompt_ids)
        extra = self._extra(request, policy)
        return policy, sampling_params(request.sampling, request.grammar, room, extra)

    def _extra(self, request: GenerationRequest, policy: Policy) -> dict[str, Any]:
        return {"kv_transfer_params": Annotation.of(request, policy).to_params()}

    def _chunks(
        self, request: GenerationRequest, policy: Policy, params: SamplingParams
    ) -> Generator[GenerationChunk, None, None]:
        started, ttft_s = perf_counter(), 0.0
        for output in self._thread.stream(request.request_id, request.prompt_ids, params):
            ttft_s = ttft_s or perf_counter() - started
            receipt = partial(self._receipt, request, policy, ttft_s)
            yield from chunks_of(output, request.sampling.logprobs, receipt)

    async def _achunks(
        self, request: GenerationRequest, policy: Policy, params: SamplingParams
    ) -> AsyncGenerator[GenerationChunk, None]:
        started, ttft_s = perf_counter(), 0.0
        outputs = self._thread.astream(request.request_id, request.prompt_ids, params)
        try:
            async for output in outputs:
                ttft_s = ttft_s or perf_counter() - started
                receipt = partial(self._receipt, request, policy, ttft_s)
                told = chunks_of(output, request.sampling.logprobs, receipt)
                ended = any(answer.finish_reason is not None for answer in output.outputs)
                # the receipt is asked of the engine between two steps; the loop has others to serve
                for chunk in await asyncio.to_thread(list, told) if ended else told:
                    yield chunk
        finally:
            await outputs.aclose()

    def _receipt(self, request: GenerationRequest, policy: Policy, ttft_s: float) -> Receipt:
        """The workers'; one that says why, when they have none."""
        told = self._rpc("cacheslide_receipt", request.request_id)
        if told is not None:
            receipt = Receipt.from_dict(told)
        else:
            reason = self.off or "no receipt: the engine did not take the annotation"
            receipt = dense_receipt(request, policy, reason, self.layers)
        return replace(receipt, ttft_s=ttft_s)

    def _warm_chunks(self, request: GenerationRequest) -> None:
        ids = list(request.prompt_ids)
        for span in request.spans:
            if span.role is Role.RECOMPUTE or not len(span):
                continue
            annotation = Annotation.of(replace(request, spans=(), session=None), Recompute())
            alone = replace(
                annotation, request_id=f"{request.request_id}-{span.id}", retain=True, isolated=True
            )
            extra = {"kv_transfer_params": alone.to_params()}
            params = sampling_params(Sampling(max_tokens=1), None, 1, extra)
            list(self._thread.stream(alone.request_id, ids[span.start : span.stop], params))

    def _pin(self, session: str, namespace: str, pinned: bool) -> None:
        expect_name("session", session)
        expect_name("namespace", namespace)
        self._rpc("cacheslide_pin", session, namespace, pinned)

    def _rpc(self, method: str, *args: object) -> Any:
        """What rank 0 answers."""
        return self._thread.call(lambda engine: engine.collective_rpc(method, args=args))[0]
