"""The fused kernels on the device: are they right, how fast are they, what memory do they take?

In: a `Setting`. Out: under `numerics` the largest difference from float64 per shape; under `speed`
seconds beside PyTorch's own attention, under `tiles` those of other tiles, to choose from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from time import perf_counter
from typing import Any

import torch
from gpu_check_facts import Report, Setting, seconds_of
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from cacheslide_agents.position.contextual import CanonicalMass, contextual_attention
from cacheslide_agents.position.kernels import Tiling, fused_attention

TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
KINDS = ("plain", "contextual", "masses", "slots", "single")
TILES = ((64, 64, 32, 8, 3), (64, 64, 32, 4, 3), (32, 64, 32, 4, 2), (128, 64, 32, 4, 3))


def check_numerics(setting: Setting, report: Report) -> None:
    """Every shape; the common ones first, in case time runs out."""
    worst = 0.0
    for dtype, head_dim, kind in shapes(setting):
        begin = perf_counter()
        try:
            error = difference(setting, dtype, head_dim, kind)
            row: dict[str, Any] = {"error": error, "ok": error <= TOLERANCE[dtype]}
            worst = max(worst, error / TOLERANCE[dtype])
        except Exception as trouble:
            row = {"ok": False, "raised": f"{type(trouble).__name__}: {trouble}"[:500]}
            worst = float("inf")
        seconds = round(perf_counter() - begin, 2)
        what = {"dtype": str(dtype), "head_dim": head_dim, "kind": kind}
        report.add("rows", **what, **row, tolerance=TOLERANCE[dtype], seconds=seconds)
    report.note(status="ok" if worst <= 1 else "wrong")


def shapes(setting: Setting) -> Iterator[tuple[torch.dtype, int, str]]:
    if setting.tiny:
        yield torch.float32, 64, "contextual"
        yield torch.float16, 64, "plain"
        return
    for dtype, head_dim in product((torch.bfloat16, torch.float16), (64, 128, 80, 96)):
        yield from ((dtype, head_dim, kind) for kind in KINDS)
    yield from product((torch.float32,), (64, 128), KINDS)


def difference(setting: Setting, dtype: torch.dtype, head_dim: int, kind: str) -> float:
    """The largest, over odd numbers of heads, rows and keys."""
    heads, kv_heads, keys, count = (3, 1, 40, 20) if setting.tiny else (9, 3, 2501, 777)
    if kind == "single":
        count = 1
    query, key, value, embedding = inputs(setting, heads, kv_heads, keys, count, head_dim, dtype)
    rows = torch.randperm(keys, device=setting.device)[:count].sort().values.int()
    options: dict[str, Any] = {"scale": head_dim**-0.5}
    masses = ()
    if kind == "masses":
        mass = torch.linspace(0, 20, heads, device=setting.device)
        masses = (
            CanonicalMass(100, 300, 500, 2000, mass),
            CanonicalMass(700, 740, 900, 2400, mass),
        )
    contextual = kind != "plain"
    lie, slots = (key, value), None
    if kind == "slots":
        slots = torch.randperm(keys + 50, device=setting.device)[:keys]
        lie = tuple(scattered(each, slots) for each in (key, value))
    found = fused_attention(
        query,
        *lie,
        rows,
        embedding=embedding if contextual else None,
        slots=slots,
        masses=masses,
        **options,
    )
    # A table of one position adds the same to every logit of a row, which softmax does not see.
    table = embedding if contextual else embedding[:, :1]
    wide = [each.double() for each in (query, key, value, table)]
    wanted = contextual_attention(*wide, rows, masses=masses, **options)
    return float((found.double() - wanted).abs().max().nan_to_num(nan=torch.inf))


def scattered(tensor: Tensor, slots: Tensor) -> Tensor:
    room = tensor.new_full((len(tensor), int(slots.max()) + 1, tensor.shape[2]), torch.nan)
    room[:, slots] = tensor
    return room


def check_speed(setting: Setting, report: Report) -> None:
    """Whole causal prompts and selected rows; 32 query and 8 key heads, bfloat16."""
    for head_dim, keys in sizes(setting):
        report.add("rows", head_dim=head_dim, keys=keys, **prompt_times(setting, head_dim, keys))
    for head_dim in (64,) if setting.tiny else (64, 128):
        keys = 32 if setting.tiny else 16384
        report.add("selected", head_dim=head_dim, **selected_times(setting, head_dim, keys))
    if setting.tiny:
        return
    for head_dim, tile in product((64, 128), TILES):
        row: dict[str, Any] = {"head_dim": head_dim, "tile": list(tile)}
        try:
            times = prompt_times(setting, head_dim, 8192, Tiling(*tile), ("plain", "contextual"))
            report.add("tiles", **row, **times)
        except Exception as trouble:  # more shared memory than there is
            report.add("tiles", **row, raised=f"{type(trouble).__name__}: {trouble}"[:200])


def sizes(setting: Setting) -> Iterator[tuple[int, int]]:
    """Head size, keys."""
    return product((64,), (32,)) if setting.tiny else product((64, 128), (4096, 8192, 16384))


def prompt_times(
    setting: Setting,
    head_dim: int,
    keys: int,
    tiling: Tiling | None = None,
    only: Sequence[str] = (),
) -> dict[str, Any]:
    """Seconds and bytes beyond the inputs of torch's flash attention and of ours.

    `shut`: gates so small that no position saturates, the worst case of CoPE.
    """
    heads, kv_heads = (2, 1) if setting.tiny else (32, 8)
    dtype = torch.float32 if setting.device == "cpu" else torch.bfloat16
    query, key, value, embedding = inputs(setting, heads, kv_heads, keys, keys, head_dim, dtype)
    rows, scale = torch.arange(keys, dtype=torch.int32, device=setting.device), head_dim**-0.5
    shut = query.clone()
    shut[..., 0], key[..., 0] = 80.0, -1.0

    def ours(queries: Tensor, table: Tensor | None) -> Callable[[], Tensor]:
        return lambda: fused_attention(
            queries, key, value, rows, scale=scale, embedding=table, tiling=tiling
        )

    works: dict[str, Callable[[], Tensor]] = {
        "sdpa": lambda: scaled_dot_product_attention(
            query[None], key[None], value[None], is_causal=True, scale=scale, enable_gqa=True
        ),
        "plain": ours(query, None),
        "contextual": ours(query, embedding),
        "shut": ours(shut, embedding),
    }
    return measured(
        {name: work for name, work in works.items() if not only or name in only}, setting
    )


def selected_times(setting: Setting, head_dim: int, keys: int) -> dict[str, Any]:
    """One row in twenty, in runs of 32, as a correction has them."""
    heads, kv_heads = (2, 1) if setting.tiny else (32, 8)
    dtype = torch.float32 if setting.device == "cpu" else torch.bfloat16
    starts = torch.arange(0, keys, 640, device=setting.device)
    rows = (starts[:, None] + torch.arange(32, device=setting.device)).flatten()
    query, key, value, embedding = inputs(
        setting, heads, kv_heads, keys, len(rows), head_dim, dtype
    )
    mask, scale = torch.arange(keys, device=setting.device) <= rows[:, None], head_dim**-0.5
    wide = [each.repeat_interleave(heads // kv_heads, dim=0)[None] for each in (key, value)]
    place = rows.int()
    works: dict[str, Callable[[], Tensor]] = {
        "sdpa_masked": lambda: scaled_dot_product_attention(
            query[None], *wide, attn_mask=mask, scale=scale
        ),
        "plain": lambda: fused_attention(query, key, value, place, scale=scale),
        "contextual": lambda: fused_attention(
            query, key, value, place, scale=scale, embedding=embedding
        ),
    }
    return {"rows": len(rows), "keys": keys, **measured(works, setting)}


def measured(works: dict[str, Callable[[], Tensor]], setting: Setting) -> dict[str, Any]:
    """`<name>_s`, and on CUDA `<name>_bytes`: the most that was held beyond the inputs."""
    figures: dict[str, Any] = {}
    for name, work in works.items():
        figures[f"{name}_s"] = seconds_of(work, 1 if setting.tiny else 7, setting.device)
        if setting.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            work()
            figures[f"{name}_bytes"] = torch.cuda.max_memory_allocated() - before
    return figures


def inputs(
    setting: Setting,
    heads: int,
    kv_heads: int,
    keys: int,
    rows: int,
    head_dim: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query, key, value and an embedding of 64 positions."""
    generator = torch.Generator(setting.device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=setting.device).to(dtype)

    query, key = normal(heads, rows, head_dim), normal(kv_heads, keys, head_dim)
    return query, key, normal(kv_heads, keys, head_dim), normal(heads, 64, head_dim) * 0.2
