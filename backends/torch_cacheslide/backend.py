"""The embedded backend: transformers decoders on CPU or CUDA, in this process.

In: `GenerationRequest`s from any thread. Out: streamed chunks with a receipt, or scores. Requests
queue; one worker thread answers them in order.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from os import PathLike
from typing import Any, cast
from weakref import finalize

import torch

from cacheslide_agents.backend import GenerationChunk, GenerationRequest, Scores
from cacheslide_agents.chunks import EncodedPrompt
from cacheslide_agents.errors import RequestError
from cacheslide_agents.pages.base import PageStore
from cacheslide_agents.pages.limits import GIB
from cacheslide_agents.policies import CacheSlide
from cacheslide_agents.policies.base import Policy
from cacheslide_agents.policies.canonical import ProfilePaths, Profiles
from cacheslide_agents.policies.checks import Checks
from cacheslide_agents.policies.cost import CostModel
from cacheslide_agents.policies.guard import DEFAULT_BUDGET, QualityGuard
from cacheslide_agents.position.contextual import Contextual
from cacheslide_agents.position.profile import Profile
from torch_cacheslide.answering import Answering
from torch_cacheslide.calibration import Calibration
from torch_cacheslide.canonical import cope_model
from torch_cacheslide.families import ends_of, position_of, stack_of, window_of
from torch_cacheslide.fused import attention_for
from torch_cacheslide.grammar import Constraint
from torch_cacheslide.idle import IdleWork
from torch_cacheslide.jobs import JobQueue
from torch_cacheslide.load import Decoupling, Loading
from torch_cacheslide.models import load_model
from torch_cacheslide.options import checked
from torch_cacheslide.remember import Refresh
from torch_cacheslide.runtime import Runtime
from torch_cacheslide.storage import Storage
from torch_cacheslide.threads import set_threads
from torch_cacheslide.writing import Writer


class TorchBackend:
    """Answers prompts with a transformers decoder: Llama, Mistral, Qwen2, Qwen3 or MPT.

    `model` is a local folder, a hub id or an alias (`smollm2-135m`). `device` defaults to CUDA
    where there is one; `dtype` to float32 on the CPU and bfloat16 on CUDA. `threads` sets torch's
    intra-op threads for the whole process.

    `store_bytes` bounds the host memory of its own page store. With `store_path`, a folder for this
    backend alone, contexts outlive the process: what leaves memory, and at `close` all of it, goes
    there, up to `disk_bytes`, and the next backend of the same model finds it. A `store` that is
    given stays the giver's, and `close` leaves it as it is.

    `prefetch` layers are loaded ahead of computation (0: none, `None`: by what gains); `decoupling`
    lets a layer start before its load is done (`load.Decoupling`). With `refresh="corrected"` the
    tokens a turn recomputes replace the stored ones, with `"never"` they do not. `guard_every=n`
    has every n-th reuse checked against a dense run, in idle time; a kind of prompt whose reuse is
    more than `guard_budget` nats from dense on the mean is answered densely until a check succeeds.
    Off by default, for benchmarks; `policies.guard.SUGGESTED_EVERY` is a sensible value.
    `profiles` are files of `cacheslide calibrate`, or folders of them, for a CoPE model.
    `kernels=False` keeps attention on CUDA to torch's own kernels, without those of `position`.
    """

    @checked
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
        store_path: str | PathLike[str] | None = None,
        disk_bytes: int = 64 * GIB,
        prefetch: int | None = None,
        decoupling: bool | str = True,
        refresh: str = "corrected",
        guard_every: int | None = None,
        guard_budget: float = DEFAULT_BUDGET,
        profiles: ProfilePaths = (),
        kernels: bool = True,
    ) -> None:
        loading = Loading(prefetch, Decoupling.of(decoupling))
        refreshing = Refresh.of(refresh)
        guard = QualityGuard(guard_every, guard_budget) if guard_every is not None else None
        if threads is not None:
            set_threads(threads)
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        dtype = dtype or (torch.bfloat16 if str(device).startswith("cuda") else torch.float32)
        attention = attention_for(str(device), kernels)
        loaded = load_model(model, device=device, dtype=dtype, attn_implementation=attention)
        config = loaded.model.config
        stack = stack_of(loaded.model)
        self.tokenizer: Any = loaded.tokenizer
        self.model_id: str = loaded.model_id
        self.path = loaded.path
        self.fingerprint: str = loaded.fingerprint
        self.layers: int = stack.layers
        self.device = stack.device
        self.dtype = stack.dtype
        self.max_model_len = window_of(config)
        self._checks = Checks(int(config.vocab_size), self.max_model_len)
        ends = ends_of(loaded.model, loaded.tokenizer)
        self._writer = Writer(loaded.tokenizer, self._checks.vocabulary, ends)
        cost = CostModel.from_config(config)
        self.position = position_of(config)
        if isinstance(self.position, Contextual) and loading.decoupling is Decoupling.SLOTS:
            raise RequestError("decoupling='slots' is not for CoPE, which counts keys; use 'late'")
        self._profiles = Profiles(partial(cope_model, loaded), profiles)
        self.profiled = self._profiles.tasks
        self._storage = Storage(store, store_bytes, store_path, disk_bytes)
        self.store = self._storage.store
        self._runtime = Runtime(
            stack,
            self.position,
            self.store,
            cost,
            loaded.fingerprint,
            loading=loading,
            refresh=refreshing,
            guard=guard,
            profiles=self._profiles,
        )
        self._queue = JobQueue(f"cacheslide-{self.model_id}")
        finalize(self, self._queue.end)
        policy = policy if policy is not None else CacheSlide()
        self._idle = IdleWork(self._runtime, self._queue, policy)
        self._work = Answering(self._runtime, self._writer, self._idle, policy, self.max_model_len)

    def generate(self, request: GenerationRequest) -> Generator[GenerationChunk, None, None]:
        """Stream the answer. Closing the iterator cancels after the prefill or token under way."""
        self._checks.prompt(request.prompt_ids)
        return self._chunks(request, self._writer.start(request))

    def agenerate(self, request: GenerationRequest) -> AsyncGenerator[GenerationChunk, None]:
        """The same for asyncio; cancelling the task cancels the request."""
        self._checks.prompt(request.prompt_ids)
        return self._achunks(request)

    def _chunks(
        self, request: GenerationRequest, start: Constraint | None
    ) -> Generator[GenerationChunk, None, None]:
        """A method, lest a backend that nobody else holds ends before its answer is out."""
        yield from self._queue.stream(partial(self._work.answer, request, start))

    async def _achunks(self, request: GenerationRequest) -> AsyncGenerator[GenerationChunk, None]:
        """A grammar takes up to seconds to compile: neither the event loop nor the worker waits."""
        start = None
        if request.grammar is not None:
            start = await asyncio.to_thread(self._writer.start, request)
        work = partial(self._work.answer, request, start)
        async with aclosing(self._queue.astream(work)) as chunks:
            async for chunk in chunks:
                yield chunk

    def score(self, request: GenerationRequest, continuation_ids: Sequence[int]) -> Scores:
        """Log-probabilities of every vocabulary entry before each continuation token."""
        room = self._checks.ids("continuation_ids", continuation_ids)
        self._checks.prompt(request.prompt_ids, room)
        (scores,) = self._queue.stream(partial(self._work.score, request, continuation_ids))
        return cast(Scores, scores)

    def warm(self, request: GenerationRequest) -> None:
        """Fill the store with what the policy will look for when a prompt like this one comes."""
        self._checks.prompt(request.prompt_ids)
        list(self._queue.stream(lambda _: self._work.warm(request)))

    def pin(self, session: str, namespace: str = "default") -> None:
        self.store.pin(session, namespace)

    def release(self, session: str, namespace: str = "default") -> None:
        self.store.unpin(session, namespace)

    def refresh(self, session: str, namespace: str = "default") -> None:
        """Have the session's newest context computed densely, when no request waits."""
        self._idle.refresh(session, namespace)

    def calibrate(
        self, prompts: Iterable[EncodedPrompt], seen: Callable[[int], None] | None = None
    ) -> Profile:
        """The CCPE profile of one task, for a CoPE model; `seen` is told how many are done."""
        calibration = Calibration(self._runtime, self._profiles.model)
        for number in self._queue.stream(partial(calibration.run, map(self._fitting, prompts))):
            if seen is not None:
                seen(number)
        return calibration.profile()

    def add_profile(self, profile: Profile) -> None:
        """Use `profile` for its task from now on. `ModelLoadError` if it is another model's."""
        self._profiles.add(profile)

    def settle(self, timeout: float | None = None) -> bool:
        """Wait until idle work (refreshes, guard checks) is done; false after `timeout` seconds."""
        return self._queue.settle(timeout)

    def metrics(self) -> Mapping[str, float]:
        return {**self._work.metrics(), **self._idle.metrics(), **self.store.metrics()}

    def close(self) -> None:
        self._queue.close()
        self._idle.close()
        self._storage.close()

    def _fitting(self, prompt: EncodedPrompt) -> EncodedPrompt:
        self._checks.prompt(prompt.ids)
        return prompt
