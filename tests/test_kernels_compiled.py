"""The fused kernels compiled for GPUs that need not be there."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from cacheslide_agents.position.kernels import Tiling
from cacheslide_agents.position.kernels.figures import Configuration, compile_kernel, configurations

SHARED = {80: 163 * 1024, 90: 227 * 1024}
"""Bytes of shared memory that a program may have on A100 and H100."""


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize("contextual", [True, False], ids=["contextual", "plain"])
def test_kernel_compiles_and_spills_nothing(architecture: int, contextual: bool) -> None:
    small = Configuration(architecture, torch.bfloat16, 64, contextual, slotted=True, rows=16)
    figures = compile_kernel(small)
    print(f"sm_{architecture}: {figures}")
    assert 0 < figures.registers <= 255
    assert figures.spilled == 0
    assert 0 < figures.shared <= SHARED[architecture]


def test_every_configuration_of_the_table_has_a_tile_of_its_own_size() -> None:
    assert {each.architecture for each in configurations()} == {80, 90}
    single = {each.tiling.rows for each in configurations() if each.rows == 1}
    assert single == {16}  # the least that a tensor core takes


@pytest.mark.parametrize(("rows", "chosen"), [(1, 16), (17, 32), (40, 64), (10_000, 64)])
def test_tiles_grow_with_the_rows_up_to_the_best(rows: int, chosen: int) -> None:
    assert Tiling.of(rows, 64, torch.bfloat16, contextual=True).rows == chosen
