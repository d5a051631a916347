"""The vLLM backend in 16-bit types, small blocks and vLLM's compiled mode, and its cache layouts.

The reference is transformers in float32 on the same weights, which all three types hold without
rounding. What vLLM itself is off by in a mode is what we may be off by: the same roundings in
another order. Measured, ours over vLLM's: 0.90 to 1.14.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

MODES = ("bfloat16", "float16", "float32")
LENGTHS = (150, 700)
SAME = 1.25
"""Ours over vLLM's distance from the reference, root mean square over tokens and vocabulary."""
LogProbs = npt.NDArray[np.float32]

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),  # vLLM's and its packages' own
]


@pytest.fixture(scope="module")
def rounded_model(lab: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The tiny model, its weights rounded to bfloat16, kept in float32."""
    from transformers import AutoTokenizer, LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(lab.tiny_model(), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16().float())
    folder = tmp_path_factory.mktemp("rounded")
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(lab.tiny_model()).save_pretrained(folder)
    return SimpleNamespace(folder=folder, model=model.eval())


@pytest.fixture(scope="module")
def asked(rounded_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    """What `support/vllm_modes.py` wrote."""
    out = tmp_path_factory.mktemp("modes") / "asked.npz"
    script = Path(__file__).with_name("support") / "vllm_modes.py"
    done = subprocess.run(
        [sys.executable, str(script), str(rounded_model.folder), str(out)],
        env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    with np.load(out) as found:
        return dict(found)


@pytest.fixture(scope="module")
def told(asked: Mapping[str, Any]) -> Any:
    return json.loads(str(asked["told"]))


@pytest.fixture(scope="module")
def reference(
    rounded_model: Any, lab: ModuleType, support: Callable[[str], ModuleType]
) -> Callable[[int, bool], LogProbs]:
    """The dense distributions after the first or the moved prompt of a length."""
    continuation = support("vllm_modes").CONTINUATION

    @cache
    def scored(length: int, moved: bool) -> LogProbs:
        ids = lab.turns(length, length)[moved]
        with torch.inference_mode():
            logits = rounded_model.model(torch.tensor([ids + continuation])).logits[0]
        found: LogProbs = logits[len(ids) - 1 : -1].log_softmax(-1).numpy()
        return found

    return scored


def distance(mine: LogProbs, other: LogProbs) -> float:
    return float(np.sqrt(np.mean((mine - other) ** 2)))


@pytest.mark.parametrize(
    ("mode", "block", "traced"),
    [("bfloat16", 64, False), ("float16", 32, False), ("float32", 96, True)],
)
def test_the_engine_reuses_in_its_mode(told: Any, mode: str, block: int, traced: bool) -> None:
    layout = told[mode]["layout"]
    assert layout["off"] == ""
    assert layout["block_sizes"] == [block, block]
    assert (layout["traced"] > 0) is traced


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("mode", MODES)
def test_dense_prefill_by_us_equals_stock(
    asked: Mapping[str, Any], told: Any, mode: str, length: int
) -> None:
    """The same kernels on the same numbers: bit for bit, unless vLLM's own pass was compiled."""
    dense, stock = (asked[f"{mode}/{length}/{name}"] for name in ("dense", "second"))
    receipt = told[mode][f"{length}/dense"]
    assert receipt["outcome"] == "fallback"
    assert receipt["active_tokens"] == receipt["prompt_tokens"]
    assert np.abs(dense - stock).max() <= (1e-3 if mode == "float32" else 0.0)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("name", "stock", "moved", "outcome"),
    [("unchanged", "first", False, "hit"), ("corrected", "second", True, "partial")],
)
def test_exact_reuse_is_as_near_the_reference_as_stock(
    asked: Mapping[str, Any],
    told: Any,
    reference: Callable[[int, bool], LogProbs],
    mode: str,
    length: int,
    name: str,
    stock: str,
    moved: bool,
    outcome: str,
) -> None:
    """An unchanged prompt that is loaded, and a moved one that is all recomputed."""
    exact = reference(length, moved)
    receipt = told[mode][f"{length}/{name}"]
    assert receipt["outcome"] == outcome
    assert (receipt["active_tokens"] == 1) is not moved
    ours, theirs = (distance(asked[f"{mode}/{length}/{each}"], exact) for each in (name, stock))
    assert ours <= SAME * theirs
    if mode == "float32":
        assert np.abs(asked[f"{mode}/{length}/{name}"] - exact).max() < 1e-3


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("mode", ["float16", "float32"])
def test_reuse_without_correction_is_told_apart_by_the_same_measure(
    asked: Mapping[str, Any], reference: Callable[[int, bool], LogProbs], mode: str, length: int
) -> None:
    exact = reference(length, True)
    ours, theirs = (
        distance(asked[f"{mode}/{length}/{each}"], exact) for each in ("uncorrected", "second")
    )
    assert ours > 2 * SAME * theirs


@pytest.mark.parametrize("mode", MODES)
def test_keys_that_move_from_turn_to_turn_are_rounded_once(
    asked: Mapping[str, Any], told: Any, support: Callable[[str], ModuleType], mode: str
) -> None:
    """Ten turns, each on the context of the one before: the same bits as after the first."""
    turns = support("vllm_modes").TURNS
    assert told[mode]["chain"] == ["cold", *["partial"] * turns]
    first, *later = asked[f"{mode}/chain"]
    assert len(later) == turns
    assert all(np.array_equal(keys, first) for keys in later)


@pytest.mark.parametrize("block", [32, 64, 96, 128])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_written_to_a_block_is_read_back_bit_for_bit(
    lab: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    block: int,
    head_dim: int,
    dtype: torch.dtype,
) -> None:
    """Through vLLM's own kernel, with the packing it chooses for the type, block and head size."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("blocks are packed on CPUs only")
    from vllm.v1.attention.backends import cpu_attn

    from vllm_cacheslide.paging import PagedCache

    config = SimpleNamespace(model_config=SimpleNamespace(dtype=dtype))
    monkeypatch.setattr(cpu_attn, "get_current_vllm_config", lambda: config)
    layer = SimpleNamespace(
        impl=cpu_attn.CPUAttentionBackendImpl(4, head_dim, 1.0, 2, None, None, "auto"),
        isa=cpu_attn._get_attn_isa(dtype, block, head_dim),
        kv_cache=torch.zeros(3, 2, block, 2 * head_dim, dtype=dtype),
        num_kv_heads=2,
        head_size=head_dim,
        _k_scale_float=1.0,
        _v_scale_float=1.0,
    )
    paged = PagedCache([layer], block)
    positions = np.arange(block // 2, 2 * block)[::3]
    slots = paged.slots([2, 0], positions)
    generator = torch.Generator().manual_seed(block)
    keys, values = (
        torch.randn(len(slots), 2, head_dim, generator=generator).to(dtype) for _ in range(2)
    )
    paged.write(0, slots, keys, values)
    read_keys, read_values = paged.read(0, slots)
    assert read_keys.equal(keys)
    assert read_values.equal(values)
    elsewhere = paged.slots([1], np.arange(block))
    assert not any(part.any() for part in paged.read(0, elsewhere))


def test_pages_are_views_where_keys_lie_beside_values(lab: ModuleType) -> None:
    """As on a GPU: [blocks, kv_heads, tokens, keys and values]."""
    from vllm_cacheslide.paging import PagedCache

    cache = torch.randn(3, 2, 4, 16)
    paged = PagedCache([SimpleNamespace(kv_cache=cache)], 4)
    both: Any = paged.pages(0)
    slots = paged.slots([2, 0], np.arange(1, 7))
    for pages, read in zip(both, paged.read(0, slots), strict=True):
        assert pages.shape == (3, 2, 4, 8)
        assert pages.untyped_storage().data_ptr() == cache.untyped_storage().data_ptr()
        assert pages.transpose(1, 2).flatten(0, 1)[slots].equal(read)
    for layer in (
        SimpleNamespace(kv_cache=torch.randn(3, 2, 16, 4).mT),
        SimpleNamespace(kv_cache=cache, isa="vec"),
    ):
        assert PagedCache([layer], 4).pages(0) is None
