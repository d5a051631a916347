"""Reuse on a CoPE model: the torch backend against transformers, and against its own dense run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from cacheslide_agents.backend import GenerationRequest, Sampling
from cacheslide_agents.errors import RequestError, UnsupportedModelError
from cacheslide_agents.policies import CacheSlide, Recompute
from cacheslide_agents.policies.base import Policy
from cacheslide_agents.selection import Boundary
from torch_cacheslide import TorchBackend
from torch_cacheslide.cope import register_cope

RANDOM = np.random.default_rng(5)
HEAD, OLD, NEW, TAIL = (RANDOM.integers(3, 250, count).tolist() for count in (40, 30, 50, 300))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, support: Callable[[str], ModuleType]) -> Path:
    sizes: dict[str, Any] = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3}
    sizes |= {"num_attention_heads": 6, "max_position_embeddings": 1024, "initializer_range": 0.2}
    folder: Path = support("tiny_models").write_cope_model(
        tmp_path_factory.mktemp("cope"), npos=16, std=0.5, seed=2, **sizes
    )
    return folder


@pytest.fixture
def backend(folder: Path) -> Iterator[TorchBackend]:
    backend = TorchBackend(str(folder), device="cpu", store_bytes=1 << 26)
    yield backend
    backend.close()


def logprobs(backend: TorchBackend, ids: list[int], policy: Policy | None) -> Any:
    continuation = [7, 8, 9]
    return backend.score(GenerationRequest(ids, policy=policy, retain=False), continuation)


def test_cold_answers_are_those_of_transformers(backend: TorchBackend, folder: Path) -> None:
    register_cope()
    reference: Any = AutoModelForCausalLM.from_pretrained(folder)
    ids = HEAD + OLD + TAIL
    found = logprobs(backend, ids, Recompute()).logprobs
    with torch.no_grad():
        wanted = reference(torch.tensor([[*ids, 7, 8]])).logits[0, -3:].log_softmax(-1)
    np.testing.assert_allclose(found, wanted.numpy(), atol=1e-4)
    sampling = Sampling(max_tokens=8, ignore_eos=True)
    chunks = backend.generate(GenerationRequest(ids, sampling=sampling))
    tokens = [token for chunk in chunks for token in chunk.token_ids]
    expected = reference.generate(
        torch.tensor([ids]), max_new_tokens=8, do_sample=False, eos_token_id=None
    )
    assert tokens == expected[0, len(ids) :].tolist()


@pytest.mark.parametrize("update", [NEW, NEW[:10]], ids=["longer", "shorter"])
def test_moved_text_with_everything_corrected_equals_dense(
    backend: TorchBackend, update: list[int]
) -> None:
    backend.warm(GenerationRequest(HEAD + OLD + TAIL))
    ids = HEAD + update + TAIL
    dense = logprobs(backend, ids, Recompute())
    whole = logprobs(backend, ids, CacheSlide(selector=Boundary(tokens=10**6), may_decline=False))
    np.testing.assert_allclose(whole.logprobs, dense.logprobs, atol=1e-4)


def test_moved_text_reused_as_it_stands_is_reused_where_it_now_stands(
    backend: TorchBackend,
) -> None:
    """Keys carry no position, so the head of the prompt is all that a shift could disturb."""
    backend.warm(GenerationRequest(HEAD + OLD + TAIL))
    ids = HEAD + NEW + TAIL
    scores = logprobs(backend, ids, CacheSlide(may_decline=False))
    assert scores.receipt.outcome in ("hit", "partial")
    assert scores.receipt.reused_tokens > 200
    assert scores.receipt.compute_fraction < 0.6


def test_several_answers_at_once_are_those_of_one_at_a_time(backend: TorchBackend) -> None:
    ids = HEAD + TAIL[:60]
    sampling: dict[str, Any] = {"max_tokens": 6, "ignore_eos": True}
    (one, *_), two = (
        [[t for c in chunks if c.index == answer for t in c.token_ids] for answer in range(count)]
        for count in (1, 2)
        for chunks in [
            list(backend.generate(GenerationRequest(ids, sampling=Sampling(n=count, **sampling))))
        ]
    )
    assert two == [one, one]  # greedy


def test_padding_is_refused_by_name(folder: Path) -> None:
    register_cope()
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor([HEAD[:8], HEAD[8:16]])
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    with pytest.raises(UnsupportedModelError, match="unpadded"):
        model(ids, attention_mask=mask)


def test_slots_out_of_order_are_refused(folder: Path) -> None:
    with pytest.raises(RequestError, match="CoPE"):
        TorchBackend(str(folder), device="cpu", decoupling="slots")
