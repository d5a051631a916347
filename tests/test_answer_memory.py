"""Answers that do not fit in memory are the request's trouble, not that of reuse."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cacheslide_agents.backend import GenerationRequest, Sampling
from cacheslide_agents.errors import RequestError
from cacheslide_agents.policies import CacheSlide
from torch_cacheslide import TorchBackend
from torch_cacheslide.cache import Arena
from torch_cacheslide.memory import slots

PROMPT = [*range(60)]


@pytest.fixture
def tiny(tmp_path: Path, support: Any) -> Iterator[TorchBackend]:
    folder = support("tiny_models").write_model(tmp_path, max_position_embeddings=256)
    backend = TorchBackend(str(folder), device="cpu", store_bytes=1 << 24)
    yield backend
    backend.close()


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 9 bytes"),
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError("no memory for that"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_answers_that_do_not_fit_are_refused_once_and_the_next_request_is_answered(
    tiny: TorchBackend,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
) -> None:
    policy = CacheSlide(may_decline=False)
    few = GenerationRequest(PROMPT, sampling=Sampling(max_tokens=4), policy=policy)
    list(tiny.generate(few))
    asked: list[int] = []

    def take(tokens: int) -> Any:
        asked.append(tokens)
        raise error

    many = GenerationRequest(PROMPT, sampling=Sampling(max_tokens=100, n=8), policy=policy)
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(tiny._runtime._arena, "take", take)
        with pytest.raises(RequestError, match=r"do not fit in memory .*lower max_tokens, n or"):
            list(tiny.generate(many))
    assert len(asked) == 1
    assert asked[0] >= len(PROMPT) + 8 * 100
    assert "dense after trouble" not in caplog.text
    assert list(tiny.generate(few))[-1].finish_reason is not None


def test_the_allocator_of_the_cpu_is_known_by_its_own_words() -> None:
    arena = Arena(1, 1, 1 << 10, dtype=torch.float32, device=torch.device("cpu"))
    with pytest.raises(RequestError, match=r"of 1099511627776 tokens.* do not fit in memory"):
        slots(arena, 1 << 40, 0)


def test_other_trouble_of_the_device_is_not_told_as_a_lack_of_memory(
    tiny: TorchBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def take(tokens: int) -> Any:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(tiny._runtime._arena, "take", take)
    with pytest.raises(RuntimeError, match=r"^CUDA error: device-side assert triggered$"):
        list(tiny.generate(GenerationRequest(PROMPT, sampling=Sampling(max_tokens=4))))
