"""The torch backend on the device: dense against shifted reuse, and what loading pages costs.

In: a `Setting`; models are SmolLM2 from a folder, or random weights of a size. Out: rows with times
to first token, their ratio, and the KL divergence of reuse from dense.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from gpu_check_facts import Report, Setting, seconds_of
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from cacheslide_agents.backend import GenerationRequest, Receipt, Sampling
from cacheslide_agents.bench.metrics import kl_divergence
from cacheslide_agents.policies import CacheSlide, Policy, Recompute
from torch_cacheslide import TorchBackend
from torch_cacheslide.cope import cope_from_llama

FORCED = 16
REUSE = CacheSlide(may_decline=False)


def check_smollm2(setting: Setting, report: Report) -> None:
    if setting.model is None:
        return report.skip("no --model folder")
    for dtype in ("float32", "bfloat16"):
        backend = TorchBackend(str(setting.model), device=setting.device, dtype=dtype)
        try:
            report.add("reuse", dtype=dtype, **compare(backend, 300 if setting.tiny else 2000))
            report.add("reuse", dtype=dtype, **compare(backend, 500 if setting.tiny else 7000))
        finally:
            backend.close()
    return None


def check_llama(setting: Setting, report: Report) -> None:
    """Random weights: times are those of a trained model, KL divergences are not."""
    lengths = (300, 600) if setting.tiny else (8192, 32768)
    with random_llama(setting) as folder:
        for kernels in (True, False):
            backend = opened(folder, setting, kernels=kernels)
            try:
                for tokens in lengths:
                    report.add("reuse", kernels=kernels, **compare(backend, tokens))
            finally:
                backend.close()
    with random_llama(setting, contextual=True) as folder:
        for kernels in (True, False):
            backend = opened(folder, setting, kernels=kernels)
            try:
                report.add("contextual", kernels=kernels, **compare(backend, lengths[0]))
            finally:
                backend.close()


def check_overlap(setting: Setting, report: Report) -> None:
    """Loads of pages beside computing: inline, ahead; and copies alone."""
    with random_llama(setting) as folder:
        for prefetch in (0, 1, 4):
            backend = opened(folder, setting, prefetch=prefetch)
            try:
                figures = compare(backend, 600 if setting.tiny else 16384)
                report.add("loading", prefetch=prefetch, **figures)
            finally:
                backend.close()
    if setting.device == "cuda":
        for kind in ("pageable", "pinned"):
            report.add("copies", memory=kind, **overlapped(kind == "pinned"))


def overlapped(pinned: bool) -> dict[str, float]:
    """Seconds of a copy, of some products, and of both at once on two streams."""
    here = torch.empty(1 << 27, dtype=torch.uint8, pin_memory=pinned)
    there = torch.empty(1 << 27, dtype=torch.uint8, device="cuda")
    factor = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    stream = torch.cuda.Stream()

    def copy() -> None:
        there.copy_(here, non_blocking=True)

    def compute() -> None:
        for _ in range(20):
            factor @ factor

    def both() -> None:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            copy()
        compute()
        torch.cuda.current_stream().wait_stream(stream)

    works = {"copy_s": copy, "compute_s": compute, "both_s": both}
    return {name: seconds_of(work, 5, "cuda") for name, work in works.items()}


def compare(backend: Any, tokens: int, repeats: int = 3) -> dict[str, Any]:
    """A prompt of `tokens`, in which 50 tokens took the place of 30 near its start."""
    random = np.random.default_rng(tokens)
    head, old, new = (random.integers(3, 15000, count).tolist() for count in (60, 30, 50))
    tail = random.integers(3, 15000, tokens - 110).tolist()
    backend.warm(GenerationRequest(head + old + tail))
    ids = head + new + tail
    _, forced = answer(backend, ids, Recompute(), FORCED)  # both warm up and compile
    answer(backend, ids, REUSE, 1)
    receipts: dict[str, list[Receipt]] = {"dense": [], "reuse": []}
    for _ in range(repeats):
        receipts["dense"].append(answer(backend, ids, Recompute(), 1)[0])
        receipts["reuse"].append(answer(backend, ids, REUSE, 1)[0])
    exact, near = (
        backend.score(GenerationRequest(ids, policy=policy, retain=False), forced).logprobs
        for policy in (Recompute(), REUSE)
    )
    last = receipts["reuse"][-1]
    ttft = {name: median(each.ttft_s for each in some) for name, some in receipts.items()}
    return {
        "tokens": tokens,
        "dense_ttft_s": ttft["dense"],
        "reuse_ttft_s": ttft["reuse"],
        "speedup": ttft["dense"] / ttft["reuse"],
        "outcome": last.outcome,
        "reason": last.reason,
        "reused_tokens": last.reused_tokens,
        "compute_fraction": last.compute_fraction,
        "plan_s": last.plan_s,
        "load_s": last.load_s,
        "compute_s": last.compute_s,
        "wait_s": last.wait_s,
        "kl_mean": kl_divergence(exact, near),
    }


def answer(backend: Any, ids: list[int], policy: Policy, tokens: int) -> tuple[Receipt, list[int]]:
    sampling = Sampling(max_tokens=tokens, ignore_eos=True)
    request = GenerationRequest(ids, sampling=sampling, policy=policy, retain=False)
    chunks = list(backend.generate(request))
    return chunks[-1].receipt, [token for chunk in chunks for token in chunk.token_ids]


def opened(folder: Path, setting: Setting, **options: Any) -> TorchBackend:
    dtype = "bfloat16" if setting.device == "cuda" else "float32"
    return TorchBackend(
        str(folder), device=setting.device, dtype=dtype, store_bytes=8 << 30, **options
    )


@contextmanager
def random_llama(setting: Setting, contextual: bool = False) -> Iterator[Path]:
    """A folder with a Llama of about 1B weights (Llama 3.2's shape), or of a few thousand."""
    sizes: dict[str, int] = {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    }
    if setting.tiny:
        sizes = {name: max(2, size // 64) for name, size in sizes.items()}
        sizes |= {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=16000, max_position_embeddings=40960, **sizes)
    torch.manual_seed(0)
    with torch.device(setting.device):
        model = LlamaForCausalLM(config)
    if contextual:
        model = cope_from_llama(model, npos=64)
        for layer in model.model.layers:
            torch.nn.init.normal_(layer.self_attn.cope_embedding, std=0.05)
    with TemporaryDirectory() as folder:
        model.to(torch.bfloat16).save_pretrained(folder)
        del model
        byte_tokenizer().save_pretrained(folder)
        yield Path(folder)


def byte_tokenizer() -> Any:
    pieces = {piece: token for token, piece in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    pieces |= {"<s>": 256, "</s>": 257}
    tokenizer = Tokenizer(models.BPE(pieces, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped: Any = PreTrainedTokenizerFast
    return wrapped(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
