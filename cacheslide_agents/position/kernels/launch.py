"""Runs the fused kernels: tensors in, attention output out.

In: query rows, keys and values as they lie in memory, each row's own place among the keys. Out: the
attention output of those rows. Memory is O(rows); nothing of rows x keys is ever stored. Forward
only: no autograd.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from cacheslide_agents.errors import RequestError
from cacheslide_agents.position.contextual import CanonicalMass

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MOST_POSITIONS = 256
"""Positions whose logits a block of rows can hold in registers and shared memory."""
MOST_HEAD_DIM = 256
SMALLEST = 16
"""What a tensor core takes at least, in every direction."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """Rows of a program; keys it takes at once, and at once while gates are counted (`near`).

    `warps` share a program; `stages` loads are in flight.
    """

    rows: int
    keys: int
    near: int
    warps: int
    stages: int

    @classmethod
    def of(cls, rows: int, head_dim: int, dtype: torch.dtype, contextual: bool) -> Tiling:
        """Chosen by registers and shared memory as compiled (`figures`); never timed on a GPU."""
        wide = head_dim > 64
        if dtype == torch.float32:
            best = cls(32, 32, 32, 4, 1)
        elif contextual:
            best = cls(64, 64, 32, 8, 2)
        else:
            best = cls(128, 64, 32, 8, 2 if wide else 3)
        if rows >= best.rows:
            return best
        return replace(best, rows=power_of_two(rows), warps=4)

    def options(self) -> dict[str, Any]:
        """For triton's compiler. Fusing is what it does by default, up to now."""
        return {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": True}


def power_of_two(count: int) -> int:
    """The smallest power of two that is at least `count` and `SMALLEST`."""
    return max(SMALLEST, 1 << (count - 1).bit_length())


def covers(dtype: torch.dtype, head_dim: int, positions: int = 1) -> bool:
    """Whether the kernels compute this: numbers, head size, positions of the embedding."""
    return dtype in DTYPES and head_dim <= MOST_HEAD_DIM and positions <= MOST_POSITIONS


def has_triton() -> bool:
    return find_spec("triton") is not None


def fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: Tensor,
    *,
    scale: float,
    embedding: Tensor | None = None,
    slots: Tensor | None = None,
    masses: Sequence[CanonicalMass] = (),
    tiling: Tiling | None = None,
) -> Tensor:
    """Query rows [heads, n, head_dim] over the keys that stand before them, and themselves.

    `key` and `value` are [kv_heads, capacity, head_dim], or pages [pages, kv_heads, page_size,
    head_dim]. `rows` [n], int32 and best ascending: row i sees the keys at places 0 to `rows[i]`;
    of a row of -1 nothing is asked, it gets 0. The key at place j lies in slot `slots[j]` (int32
    or int64; slot s is entry s % page_size of page s // page_size), or in slot j. With `embedding`
    [heads, npos, head_dim] positions are contextual, as in `contextual_attention`, and `masses` are
    canonical; without, keys carry what position they have. Returns [heads, n, head_dim].

    `RequestError` for what the kernels do not cover (see `covers`).
    """
    positions = 1 if embedding is None else embedding.shape[1]
    if not covers(query.dtype, query.shape[-1], positions):
        raise RequestError(
            f"no kernel for {query.dtype}, heads of {query.shape[-1]} and {positions} positions: "
            f"float16, bfloat16 or float32, at most {MOST_HEAD_DIM} and {MOST_POSITIONS}"
        )
    contextual = embedding is not None
    tiling = tiling or Tiling.of(query.shape[1], query.shape[2], query.dtype, contextual)
    query, key, value = (_rowwise(each) for each in (query, key, value))
    rows = rows.contiguous()
    slots, embedding = (each if each is None else each.contiguous() for each in (slots, embedding))
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    with torch.cuda.device(query.device) if query.is_cuda else nullcontext():
        factors = None
        if masses and embedding is not None:
            factors = _factors(query, key, rows, slots, masses, scale, positions - 1, tiling)
        _kernels().row_attention[_grid(query, tiling)](
            query, key, value, embedding, rows, slots, *(factors or (None, None)), output,
            *query.stride()[:2], *_strides(key), *_strides(value), *output.stride()[:2],
            query.shape[1], len(masses), scale, positions - 1,
            CONTEXTUAL=contextual, NPOS=power_of_two(positions), MASSES=bool(masses),
            NEAR=tiling.near,
            **_shape(query, key, slots, tiling),
        )  # fmt: skip
    return output


def _factors(
    query: Tensor,
    key: Tensor,
    rows: Tensor,
    slots: Tensor | None,
    masses: Sequence[CanonicalMass],
    scale: float,
    last: int,
    tiling: Tiling,
) -> tuple[Tensor, Tensor]:
    """Borders [masses, 4] and, by a launch per mass, factors [heads, masses, rows]."""
    heads, count, _ = query.shape
    masses = sorted(masses, key=lambda mass: -mass.stop)  # as `contextual_attention` applies them
    borders = torch.tensor(
        [(each.start, each.stop, each.first_row, each.last_row) for each in masses],
        dtype=torch.int32,
        device=query.device,
    )
    mass = torch.stack([each.mass.to(query.device, torch.float32) for each in masses], dim=1)
    factors = torch.empty(heads, len(masses), count, dtype=torch.float32, device=query.device)
    for each in range(len(masses)):
        _kernels().mass_factors[_grid(query, tiling)](
            query, key, rows, slots, borders, mass, factors,
            *query.stride()[:2], *_strides(key), count, len(masses), each, scale, last,
            **_shape(query, key, slots, tiling),
        )  # fmt: skip
    return borders, factors


def _grid(query: Tensor, tiling: Tiling) -> tuple[int, int]:
    heads, count, _ = query.shape
    return -(-count // tiling.rows), heads


def _shape(query: Tensor, key: Tensor, slots: Tensor | None, tiling: Tiling) -> dict[str, Any]:
    """What both kernels are compiled for."""
    head_dim = query.shape[2]
    return {
        "GROUPS": query.shape[0] // key.shape[-3],
        "DIM": head_dim,
        "WIDTH": power_of_two(head_dim),
        "SLOTTED": slots is not None,
        "PAGE_SIZE": key.shape[2] if key.dim() == 4 else 0,
        "ROWS": tiling.rows,
        "KEYS": tiling.keys,
        "PRECISION": "ieee",
        **tiling.options(),
    }


def _strides(paged: Tensor) -> tuple[int, int, int]:
    """From page to page, head to head, slot to slot, in numbers."""
    *page, head, slot, _ = paged.stride()
    return (page[0] if page else 0), head, slot


def _rowwise(tensor: Tensor) -> Tensor:
    """With the numbers of one vector side by side."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _kernels() -> Any:
    """Imported late: triton is not everywhere, and takes its time."""
    return import_module("cacheslide_agents.position.kernels.scan")
