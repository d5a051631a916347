"""Blocks of rows: what they cover, and that attention over them is masked softmax."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from torch_cacheslide import attention
from torch_cacheslide.attention import attend
from torch_cacheslide.layout import LONG_RUN, Layouts, row_layout

CPU = torch.device("cpu")
HEADS, KV_HEADS, HEAD_DIM, CAPACITY = 6, 2, 16, 1200
SCATTERED = np.random.default_rng(5).choice(1000, 120, replace=False)
ROWS = {
    "one": [700],
    "whole": range(300),
    "short whole": range(9),
    "short tail": range(500, 500 + LONG_RUN - 1),
    "long tail": range(500, 900),
    "two long runs": [*range(200), *range(400, 600)],
    "scattered": sorted(SCATTERED),
    "all kinds": sorted({*SCATTERED, *range(400, 520), *range(1000, 1100)}),
}


def masked_softmax(query: Tensor, key: Tensor, value: Tensor, rows: Tensor) -> Tensor:
    """float64 [1, rows, heads, head_dim], by the formula."""
    query, key, value = (tensor.double() for tensor in (query, key, value))
    key, value = (
        tensor.repeat_interleave(HEADS // KV_HEADS, dim=1)[:, :, : int(rows[-1]) + 1]
        for tensor in (key, value)
    )
    scores = query @ key.transpose(2, 3) * 0.3
    hidden = torch.arange(key.shape[2]) > rows[:, None]
    return (scores.masked_fill(hidden, -torch.inf).softmax(3) @ value).transpose(1, 2)


@pytest.mark.parametrize("flash", [True, False], ids=["flash", "mask"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ROWS)
def test_rows_attend_to_all_that_is_not_behind_them(
    name: str, dtype: torch.dtype, flash: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert attention._FLASH_ON_CPU is not None, "PyTorch has renamed its kernel"
    if not flash:
        monkeypatch.setattr(attention, "_FLASH_ON_CPU", None)
    rows = np.array(list(ROWS[name]))
    random = torch.Generator().manual_seed(3)
    query = torch.randn(1, HEADS, len(rows), HEAD_DIM, generator=random).to(dtype)
    key, value = (
        torch.randn(1, KV_HEADS, CAPACITY, HEAD_DIM, generator=random).to(dtype) for _ in "kv"
    )
    wanted = masked_softmax(query, key, value, torch.from_numpy(rows))
    module = SimpleNamespace(layer_idx=0)
    found, _ = attend(
        module,  # type: ignore[arg-type]
        query,
        key,
        value,
        None,
        scaling=0.3,
        layout=Layouts(rows, CPU),
    )
    error = 2e-6 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(found.double(), wanted, rtol=error, atol=error)


@pytest.mark.parametrize("name", ROWS)
def test_blocks_partition_the_rows_and_long_runs_are_causal(name: str) -> None:
    rows = np.array(list(ROWS[name]))
    layout = row_layout(rows, CPU)
    assert [block.start for block in layout] == [0, *(block.stop for block in layout[:-1])]
    assert layout[-1].stop == len(rows)
    for block in layout:
        mine = rows[block.start : block.stop]
        side_by_side = mine[-1] - mine[0] + 1 == len(mine)
        assert block.keys == mine[-1] + 1
        alone = len(mine) == len(rows) > 1
        assert block.causal == (side_by_side and (alone or len(mine) >= LONG_RUN))
