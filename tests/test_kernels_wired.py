"""The torch backend with fused kernels, whose part a stand-in plays on the CPU."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from cacheslide_agents.backend import GenerationRequest, Sampling
from cacheslide_agents.pages.slots import SlotMap
from cacheslide_agents.policies import CacheSlide, Prefix, Recompute
from cacheslide_agents.policies.base import Policy
from cacheslide_agents.position.kernels import Tiling, trust
from torch_cacheslide import TorchBackend, fused
from torch_cacheslide.attention import (
    ATTENTION_NAME,
    FUSED_ATTENTION_NAME,
    attend,
)
from torch_cacheslide.cope import cope_from_llama
from torch_cacheslide.layout import Layouts, attention_pairs, row_layout, row_pairs

if TYPE_CHECKING:
    from tests.support.kernel_stand_in import StandIn

RANDOM = np.random.default_rng(9)
HEAD, OLD, NEW, TAIL = (RANDOM.integers(3, 250, count).tolist() for count in (40, 30, 50, 300))
REUSE = CacheSlide(may_decline=False)
TILE = Tiling(16, 32, 16, 4, 1)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch, support: Callable[[str], ModuleType]) -> StandIn:
    stand_in: StandIn = support("kernel_stand_in").StandIn()
    monkeypatch.setattr(fused, "fused_attention", stand_in)
    monkeypatch.setattr(fused, "trusted", lambda *_: True)
    return stand_in


@pytest.fixture(scope="module", params=["rotary", "contextual"])
def folder(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    support: Callable[[str], ModuleType],
) -> Path:
    tiny = support("tiny_models")
    sizes = {"max_position_embeddings": 1024, "initializer_range": 0.3, "num_hidden_layers": 3}
    folder: Path = tiny.write_model(tmp_path_factory.mktemp(request.param), **sizes)
    if request.param == "contextual":
        base: Any = LlamaForCausalLM
        model = cope_from_llama(base.from_pretrained(folder), npos=16)
        for layer in model.model.layers:
            torch.nn.init.normal_(layer.self_attn.cope_embedding, std=0.5)
        model.save_pretrained(folder)
    return folder


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., TorchBackend]]:
    """Backends that take the fused attention although there is no GPU, unless told not to."""
    backends: list[TorchBackend] = []

    def attention_for(_: str, kernels: bool) -> str:
        plain = fused.attention_for("cpu", kernels)
        return FUSED_ATTENTION_NAME if kernels else plain

    monkeypatch.setattr("torch_cacheslide.backend.attention_for", attention_for)

    def open_one(folder: Path, **options: Any) -> TorchBackend:
        backends.append(TorchBackend(str(folder), device="cpu", store_bytes=1 << 26, **options))
        return backends[-1]

    yield open_one
    for backend in backends:
        backend.close()


def scores(backend: TorchBackend, policy: Policy) -> Any:
    backend.warm(GenerationRequest(HEAD + OLD + TAIL))
    request = GenerationRequest(HEAD + NEW + TAIL, policy=policy, retain=False)
    return backend.score(request, [7, 8, 9]).logprobs


@pytest.mark.parametrize("policy", [Recompute(), Prefix(), REUSE], ids=lambda each: each.name)
def test_answers_are_those_of_torchs_own_attention(
    folder: Path, opened: Callable[..., TorchBackend], stand_in: StandIn, policy: Policy
) -> None:
    plain = scores(opened(folder, kernels=False), policy)
    assert stand_in.calls == []
    with_kernels = scores(opened(folder), policy)
    np.testing.assert_allclose(with_kernels, plain, atol=2e-4)
    contextual = {call[1] for call in stand_in.calls}
    if folder.name.startswith("contextual"):
        assert contextual == {True}
        assert {rows for rows, _, _ in stand_in.calls} >= {370}  # the first prompt, whole
    elif not isinstance(policy, Recompute):
        assert contextual == {False}
        assert all(
            1 < rows < 370 for rows, _, _ in stand_in.calls
        )  # torch has kernels for the rest


def test_rows_in_fresh_slots_are_found_there(stand_in: StandIn) -> None:
    rows = np.array([2, 5, 6, 9])
    slots = SlotMap(rows[:3], prompt=10, rows=12, spare=4)
    slots.move(1)
    layouts = Layouts(rows, torch.device("cpu"), slots)
    query = torch.randn(1, 4, 4, 8)
    key, value = torch.randn(2, 1, 2, 16, 8)
    layer: Any = torch.nn.Module()
    layer.layer_idx = 1
    found, _ = fused.attend_fused(layer, query, key, value, None, scaling=0.3, layout=layouts)
    wanted, _ = attend(layer, query, key, value, None, scaling=0.3, layout=layouts)
    torch.testing.assert_close(found, wanted)
    assert stand_in.calls == [(4, False, True)]


def test_several_answers_leave_their_rows_to_torch(
    folder: Path, opened: Callable[..., TorchBackend], stand_in: StandIn
) -> None:
    backend = opened(folder)
    request = GenerationRequest(HEAD, sampling=Sampling(n=2, max_tokens=4, ignore_eos=True))
    tokens: dict[int, list[int]] = {0: [], 1: []}
    for chunk in backend.generate(request):
        tokens[chunk.index] += chunk.token_ids
    assert tokens[0] == tokens[1]
    contextual = folder.name.startswith("contextual")
    assert {rows for rows, _, _ in stand_in.calls} == ({len(HEAD)} if contextual else set())


def test_kernel_that_cannot_run_here_is_not_trusted_and_the_log_says_why(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> Tensor:
        raise RuntimeError("out of shared memory")

    monkeypatch.setattr(trust, "fused_attention", broken)
    with caplog.at_level(logging.WARNING):
        assert not trust.trusted(trust.Kind(torch.device("cpu"), torch.float32, 32, 2, 16, TILE))
    assert "out of shared memory" in caplog.text


@pytest.mark.parametrize(
    ("slotted", "page_size"),
    [(False, 0), (True, 0), (True, 16)],
    ids=["in order", "slots", "pages"],
)
@pytest.mark.parametrize(
    ("positions", "massed"), [(0, False), (16, False), (64, True)], ids=["plain", "cope", "ccpe"]
)
def test_kernel_is_trusted_if_and_only_if_it_agrees(
    monkeypatch: pytest.MonkeyPatch,
    stand_in: StandIn,
    positions: int,
    massed: bool,
    slotted: bool,
    page_size: int,
) -> None:
    device = torch.device("cpu")
    kind = trust.Kind(device, torch.float32, 40, 2, positions, TILE, slotted, massed, page_size)
    monkeypatch.setattr(trust, "fused_attention", stand_in)
    assert trust.trusted.__wrapped__(kind)
    assert stand_in.calls == [(TILE.rows, positions > 0, slotted)]
    for off in (0.01, torch.nan):
        spoilt = partial(lambda off, *a, **k: stand_in(*a, **k) + off, off)
        monkeypatch.setattr(trust, "fused_attention", spoilt)
        assert not trust.trusted.__wrapped__(kind)
    if massed:
        monkeypatch.setattr(
            trust, "fused_attention", lambda *a, **k: stand_in(*a, **(k | {"masses": ()}))
        )
        assert not trust.trusted.__wrapped__(kind)


def test_the_switch_and_the_device_decide() -> None:
    assert fused.attention_for("cpu", True) == ATTENTION_NAME
    assert fused.attention_for("cuda", False) == ATTENTION_NAME
    if find_spec("triton") is not None:
        assert fused.attention_for("cuda:1", True) == FUSED_ATTENTION_NAME


@pytest.mark.parametrize(
    "rows", [[5], list(range(70)), [3, 4, 9, 200], list(range(20, 400, 3))], ids=len
)
def test_pairs_are_counted_without_masks(rows: list[int]) -> None:
    index = np.array(rows)
    assert row_pairs(index) == attention_pairs(row_layout(index, torch.device("cpu")))
