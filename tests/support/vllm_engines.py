"""vLLM engines on tiny random models, one per configuration and session, and ways to ask them.

In: a configuration's name. Out: a backend that many tests share; answers with log-probabilities.
"""

from __future__ import annotations

import atexit
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import mkdtemp
from time import sleep
from typing import Any

import numpy as np
import numpy.typing as npt

from cacheslide_agents.backend import GenerationRequest, Receipt, Sampling
from cacheslide_agents.pages.base import ContextKey
from cacheslide_agents.policies.base import Policy

MISSING = "" if find_spec("vllm") else "vLLM is not installed"
VOCABULARY = 512
TOKENS = 12

# One engine lives in this process, where tests can reach into it; the other in its own processes.
_COMMON: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 2048,
    "max_num_seqs": 16,
    "enforce_eager": True,
    "store_bytes": 1 << 28,
}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "inside": {"max_num_batched_tokens": 2048},
    "outside": {
        "max_num_batched_tokens": 256,
        "enable_prefix_caching": False,
        "num_gpu_blocks_override": 26,  # of 128 tokens: several requests at once do not fit
    },
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


@cache
def engine(name: str) -> Any:
    """The shared backend of configuration `name`."""
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if name == "inside" else "1"
    from vllm.envs import disable_envs_cache

    from vllm_cacheslide.backend import VllmBackend

    disable_envs_cache()  # an engine in this process has had it remember where engines run
    backend = VllmBackend(str(tiny_model()), **_COMMON, **CONFIGURATIONS[name])
    atexit.register(_close, backend)
    return backend


def _close(backend: Any) -> None:
    """At exit, when the streams that vLLM logs to, pytest's, are closed already."""
    logging.raiseExceptions = False
    backend.close()


@cache
def tiny_model() -> Path:
    """A Llama with random weights, large enough that positions matter."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = Path(mkdtemp(prefix="tiny-vllm-"))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = ["<s>", "</s>", *letters, *(f"<{number}>" for number in range(VOCABULARY))]
    vocabulary = {piece: token for token, piece in enumerate(pieces[:VOCABULARY])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped: Any = PreTrainedTokenizerFast
    wrapped(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    return folder


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
    """Empty vLLM's own prefix cache; what we have stored stays.

    It refuses while blocks are in use: of requests that have finished a moment ago, say.
    """
    for _ in range(1000):
        if backend._thread.call(lambda engine: engine.reset_prefix_cache()):
            return
        sleep(0.01)
    raise AssertionError("vLLM's blocks are still in use")


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
