"""vLLM engines on tiny random models, one per configuration and session, and ways to ask them.

In: a configuration's name. Out: a backend that many tests share; answers with log-probabilities.
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from runpy import run_path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import numpy.typing as npt

from cacheslide_agents.backend import GenerationRequest, Receipt, Sampling
from cacheslide_agents.chunks import EncodedPrompt, Role, Span
from cacheslide_agents.pages.base import ContextKey
from cacheslide_agents.policies.base import Policy

MISSING = "" if find_spec("vllm") else "vLLM is not installed"
SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
VOCABULARY = 512
TOKENS = 12
PROFILED = "profiled"
"""The task that has a CCPE profile."""
BLOCK = 128
"""Tokens of a block of vLLM's, whatever a platform's own choice is."""

# One engine lives in this process, where tests can reach into it; others in their own processes.
_COMMON: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 2048,
    "max_num_seqs": 16,
    "block_size": BLOCK,
    "gpu_memory_utilization": 0.2,  # the servers' engines want a place on the same device
    "enforce_eager": True,
    "store_bytes": 1 << 28,
}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "inside": {"max_num_batched_tokens": 2048},
    "outside": {
        "max_num_batched_tokens": 256,
        "enable_prefix_caching": False,
        "num_gpu_blocks_override": 26,  # several requests at once do not fit
    },
    "ranks": {"max_num_batched_tokens": 2048, "tensor_parallel_size": 2},
    "cope": {"max_num_batched_tokens": 256, "gpu_memory_utilization": 0.1},
}


@dataclass(frozen=True)
class Answer:
    """Greedy tokens and their log-probabilities."""

    tokens: tuple[int, ...]
    logprobs: npt.NDArray[np.float64]
    receipt: Receipt

    def equals(self, other: Answer) -> bool:
        same = self.tokens == other.tokens
        return same and bool(np.abs(self.logprobs - other.logprobs).max() < 1e-3)


def engine(name: str) -> Any:
    """The shared backend of configuration `name`; one that fails to start is not tried again."""
    made = _started(name)
    if isinstance(made, Exception):
        raise made
    return made


@cache
def _started(name: str) -> Any:
    try:
        return _start(name)
    except Exception as error:
        return error


def _start(name: str) -> Any:
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if name == "inside" else "1"
    from vllm.envs import disable_envs_cache

    disable_envs_cache()  # an engine in this process has had it remember where engines run
    if name == "cope":
        backend = start(str(cope_model()), {**CONFIGURATIONS[name], "profiles": cope_profiles()})
    else:
        backend = start(str(tiny_model()), CONFIGURATIONS[name])
    atexit.register(_close, backend)
    return backend


def start(model: str, options: dict[str, Any]) -> Any:
    """A backend of one's own, to be closed; vLLM's environment says where its engine runs."""
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # `on_ranks` sends functions
    from vllm_cacheslide.backend import VllmBackend

    return VllmBackend(model, **{**_COMMON, **options})


def _close(backend: Any) -> None:
    """At exit, when the streams that vLLM logs to, pytest's, are closed already."""
    logging.raiseExceptions = False
    backend.close()


@cache
def tiny_model() -> Path:
    """A Llama with random weights, large enough that positions matter."""
    write = run_path(str(SCRIPTS / "tiny_llama.py"))["write_tiny_llama"]
    folder: Path = write(Path(mkdtemp(prefix="tiny-vllm-")))
    return folder


@cache
def cope_model() -> Path:
    """The same converted to contextual positions; more tokens than positions in every prompt."""
    import torch
    from transformers import LlamaForCausalLM

    from torch_cacheslide.cope import cope_from_llama

    folder = Path(mkdtemp(prefix="tiny-cope-")) / "model"
    shutil.copytree(tiny_model(), folder)
    model = cope_from_llama(LlamaForCausalLM.from_pretrained(folder), npos=16)
    torch.manual_seed(1)
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.cope_embedding, std=0.03)
    model.save_pretrained(folder)
    return folder


@cache
def cope_profiles() -> Path:
    """A folder with the CCPE profile of that model for one task, `PROFILED`."""
    from torch_cacheslide import TorchBackend

    firsts = [turns(seed, 500)[0] for seed in (80, 81, 82)]
    backend = TorchBackend(str(cope_model()), dtype="float32")
    prompts = [EncodedPrompt(tuple(ids), parts(ids, 120), "", PROFILED) for ids in firsts]
    folder = Path(mkdtemp(prefix="tiny-profiles-"))
    backend.calibrate(prompts).save(folder)
    backend.close()
    return folder


def parts(ids: list[int], cut: int) -> tuple[Span, ...]:
    """Of a prompt whose tokens 100 to `cut` change from turn to turn."""
    return (
        Span("head", Role.REUSE, 0, 100, "head"),
        Span("update", Role.RECOMPUTE, 100, cut, f"update{cut}"),
        Span("tail", Role.REUSE, cut, len(ids), "tail"),
    )


def request(
    ids: list[int], policy: Policy, *, namespace: str, retain: bool = False, **sampling: Any
) -> GenerationRequest:
    given = {"max_tokens": TOKENS, "ignore_eos": True, "logprobs": 0, **sampling}
    return GenerationRequest(
        ids, namespace=namespace, policy=policy, retain=retain, sampling=Sampling(**given)
    )


def ask(backend: Any, asked: GenerationRequest) -> Answer:
    tokens: list[int] = []
    logprobs: list[float] = []
    for chunk in backend.generate(asked):
        tokens += chunk.token_ids
        logprobs += [told.logprob for told in chunk.logprobs or ()]
    assert chunk.receipt is not None
    return Answer(tuple(tokens), np.array(logprobs), chunk.receipt)


def ask_together(backend: Any, requests: list[GenerationRequest]) -> list[Answer]:
    """All in the engine at the same time."""
    with ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(lambda asked: ask(backend, asked), requests))


def turns(seed: int, length: int = 700) -> tuple[list[int], list[int]]:
    """A prompt, and the same with a longer passage in its first fifth: what follows has moved."""
    numbers = np.random.default_rng(seed)

    def text(count: int) -> list[int]:
        return [int(token) for token in numbers.integers(2, VOCABULARY, count)]

    head, tail = text(length // 5), text(length - length // 5)
    return head + text(20) + tail, head + text(37) + tail


def model_of(backend: Any) -> str:
    """The folder its model was loaded from."""
    folder: str = backend._thread.call(lambda engine: engine.vllm_config.model_config.model)
    return folder


def forget_prefixes(backend: Any) -> None:
    """Empty vLLM's own prefix cache; what we have stored stays."""
    backend.forget_prefixes()


def preemptions(backend: Any) -> int:
    """How often vLLM has taken a running request's blocks away."""
    found = backend._thread.call(lambda engine: engine.get_metrics())
    return sum(each.value for each in found if each.name == "vllm:num_preemptions")


def working(backend: Any) -> Any:
    """The worker's side of the engine that lives in this process."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return backend._thread.call(lambda _: get_kv_transfer_group().working)


def key_of(backend: Any, namespace: str) -> ContextKey:
    from vllm_cacheslide.identity import fingerprint

    made = backend._thread.call(lambda engine: fingerprint(engine.vllm_config))
    return ContextKey(made, namespace, "default")


def scheduling(backend: Any) -> Any:
    """The scheduler's side of the engine that lives in this process."""
    return backend._thread.call(
        lambda engine: engine.engine_core.engine_core.scheduler.connector.scheduling
    )


def settle(backend: Any) -> None:
    """Until the engine has told its workers of every request that has finished."""
    backend._thread.call(lambda engine: None)


def on_ranks(backend: Any, work: Callable[[Any], None]) -> None:
    """`work(worker)` in every rank's process."""
    backend._thread.call(lambda engine: engine.collective_rpc(work))


def lose_contexts(worker: Any) -> None:
    """The second rank forgets what it has stored."""
    if worker.rank == 1:
        worker._working().store.clear()


def tear_pages(worker: Any) -> None:
    """The second rank cannot read layers from the third on."""
    if worker.rank != 1:
        return
    store = worker._working().store
    sound = store.load

    def load(context: Any, layer: int, *rest: Any) -> Any:
        if layer >= 2:
            raise RuntimeError("torn page")
        return sound(context, layer, *rest)

    store.load = load


def mend_pages(worker: Any) -> None:
    vars(worker._working().store).pop("load", None)
