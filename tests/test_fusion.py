"""Fusion of recomputed and cached keys and values against the paper's formula in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from cacheslide_agents.position import Rotary
from cacheslide_agents.selection import Fusion, PaperFusion, Replace


def pair(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    new, cached = torch.randn(2, 3, 40, 8, generator=generator, dtype=torch.float64)
    cached[:, :20] = new[:, :20] + 0.05 * cached[:, :20]
    return new.to(dtype), cached.to(dtype)


def weight_by_formula(new: Tensor, cached: Tensor) -> np.ndarray[tuple[int, ...], np.dtype]:
    fresh, old = new.double().numpy(), cached.double().numpy()
    rows = range(new.shape[1])
    far = [np.linalg.norm(fresh[:, row] - old[:, row]) ** 2 for row in rows]
    long = [np.linalg.norm(old[:, row]) ** 2 for row in rows]
    return np.array(far) / np.array(long)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_the_paper_weight_is_the_relative_squared_key_deviation(dtype: torch.dtype) -> None:
    new, cached = pair(dtype)
    weight = PaperFusion().weight(new, cached)
    assert weight.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    expected = weight_by_formula(new, cached)
    np.testing.assert_allclose(weight.numpy(), expected, rtol=1e-5)
    assert expected[:20].max() < 0.01 and expected[20:].max() > 1, "both regimes are covered"


def test_paper_fusion_mixes_by_the_weight_and_extrapolates_above_one() -> None:
    new, cached = pair()
    weight = PaperFusion().weight(new, cached)
    fused = PaperFusion().fuse(new, cached, weight)
    for row in (0, 19, 20, 39):
        a = float(weight[row])
        expected = a * new[:, row].numpy() + (1 - a) * cached[:, row].numpy()
        np.testing.assert_allclose(fused[:, row].numpy(), expected, rtol=1e-12)


def test_paper_fusion_without_an_earlier_weight_lets_the_new_values_win() -> None:
    new, cached = pair()
    assert torch.equal(PaperFusion().fuse(new, cached, None), new)
    torch.testing.assert_close(PaperFusion().fuse(new, cached, torch.ones(40)), new)


def test_paper_fusion_keeps_the_dtype_of_the_cache_and_mixes_in_float32() -> None:
    new, cached = pair(torch.bfloat16)
    weight = PaperFusion().weight(new, cached)
    fused = PaperFusion().fuse(new, cached, weight)
    assert fused.dtype == torch.bfloat16
    share = weight[:, None]
    assert torch.equal(fused, (share * new.float() + (1 - share) * cached.float()).bfloat16())


def test_a_zero_cached_key_gives_a_finite_weight() -> None:
    new, cached = torch.full((1, 2, 4), 1e-4), torch.zeros(1, 2, 4)
    new[:, 1] = 0
    weight = PaperFusion().weight(new, cached)
    torch.testing.assert_close(weight, torch.tensor([4e-8 / 1e-12, 0.0]))


def test_fusing_rotated_keys_equals_rotating_fused_keys() -> None:
    rotary = Rotary(torch.tensor([1.0, 0.3, 0.1, 0.01]))
    new, cached = pair()
    cos, sin = rotary.cos_sin(torch.arange(70, 110), torch.float64)
    fusion = PaperFusion()
    free = fusion.fuse(new, cached, fusion.weight(new, cached))
    new, cached = rotary.rotate(new, cos, sin), rotary.rotate(cached, cos, sin)
    fused = fusion.fuse(new, cached, fusion.weight(new, cached))
    torch.testing.assert_close(fused, rotary.rotate(free, cos, sin), rtol=1e-10, atol=1e-12)


def test_replace_takes_the_new_values_and_reads_no_cached_ones() -> None:
    new, cached = pair()
    replace: Fusion = Replace()
    assert not replace.needs_cached and PaperFusion().needs_cached
    assert replace.weight(new, cached) is None
    assert replace.fuse(new, cached, None) is new


@pytest.mark.parametrize("fusion", [PaperFusion(), Replace()], ids=["paper", "replace"])
def test_no_rows_are_fused_to_no_rows(fusion: Fusion) -> None:
    assert isinstance(fusion, Fusion)
    empty = torch.empty(3, 0, 8)
    assert fusion.fuse(empty, empty, fusion.weight(empty, empty)).shape == (3, 0, 8)
