"""Attention with a mask by position, in the engine's place: by the fused kernel, or by SDPA.

In: queries of a batch's rows. Out: their attention to all that stands before each row in vLLM's
pages. The layers still write the rows' keys and values as the engine does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from cacheslide_agents.position.kernels import fused_attention
from cacheslide_agents.position.kernels.trust import trusted_on_pages
from vllm_cacheslide.attention import Runs
from vllm_cacheslide.paging import PagedCache
from vllm_cacheslide.rows import Batch, Job, Rows

if TYPE_CHECKING:
    from vllm.model_executor.layers.attention import Attention

Attend = Callable[[int, Tensor, float], Tensor | None]
"""Of a layer, for queries [rows, heads, head_dim] and a scale; `None` leaves it to the engine."""


class OwnAttention(Protocol):
    """`prepared(batch)`: what the layers' attention is while the batch goes through them."""

    def prepared(self, batch: Batch) -> Attend: ...


class Masked:
    """The model's layers, whose attention `own` computes."""

    def __init__(self, runs: Runs, attentions: list[Attention], own: OwnAttention) -> None:
        self._runs, self._attentions, self._own = runs, attentions, own

    @contextmanager
    def entered(self, batch: Batch, slots: Tensor, positions: Tensor) -> Iterator[None]:
        attend = self._own.prepared(batch)
        with self._runs.entered(batch, slots, positions), ExitStack() as swapped:
            for layer, attention in enumerate(self._attentions):
                swapped.callback(setattr, attention, "impl", attention.impl)
                attention.impl = _Substitute(attention.impl, partial(attend, layer))
            yield


class SdpaAttention:
    """PyTorch's SDPA over gathered keys; slow, for checks."""

    def __init__(self, paged: PagedCache) -> None:
        self._paged = paged

    def prepared(self, batch: Batch) -> Attend:
        parts = [
            (torch.from_numpy(rows), _slots(self._paged, job, rows)) for job, rows in batch.parts
        ]
        lengths = [len(rows) for rows, _ in parts]

        def attend(layer: int, queries: Tensor, scale: float) -> Tensor:
            attended = []
            for mine, (rows, slots) in zip(queries.split_with_sizes(lengths), parts, strict=True):
                keys, values = self._paged.read(layer, slots)
                mask = torch.arange(len(keys)) <= rows[:, None]
                each = scaled_dot_product_attention(
                    mine.transpose(0, 1)[None],
                    keys.transpose(0, 1)[None],
                    values.transpose(0, 1)[None],
                    attn_mask=mask[None, None].to(keys.device),
                    scale=scale,
                    enable_gqa=True,
                )
                attended.append(each[0].transpose(0, 1))
            return torch.cat(attended)

        return attend


class FusedAttention:
    """The fused kernel, which reads the pages where they lie, for rows that are scattered.

    Rows side by side are left to the engine, which has faster kernels for them, and so is what the
    fused kernel cannot read.
    """

    def __init__(self, paged: PagedCache) -> None:
        self._paged = paged

    def prepared(self, batch: Batch) -> Attend:
        if len(batch.runs) == len(batch.parts):
            return lambda *_: None
        device = self._paged.device
        parts = [
            (torch.from_numpy(rows).int().to(device), _slots(self._paged, job, rows))
            for job, rows in batch.parts
        ]
        lengths = [len(rows) for rows, _ in parts]

        def attend(layer: int, queries: Tensor, scale: float) -> Tensor | None:
            pages = self._paged.pages(layer)
            split = queries.transpose(0, 1).split_with_sizes(lengths, dim=1)
            if pages is None or not all(trusted_on_pages(mine, pages[0]) for mine in split):
                return None
            attended = [
                fused_attention(mine, *pages, rows, scale=scale, slots=slots)
                for mine, (rows, slots) in zip(split, parts, strict=True)
            ]
            return torch.cat(attended, dim=1).transpose(0, 1)

        return attend


class _Substitute:
    """An attention implementation that writes like `inner`, and attends by `attend` if that can."""

    def __init__(self, inner: Any, attend: Callable[[Tensor, float], Tensor | None]) -> None:
        self._inner, self._attend = inner, attend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def forward(
        self,
        layer: object,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: object,
        output: Tensor,
        *rest: object,
        **others: object,
    ) -> Tensor:
        attended = self._attend(query, self._inner.scale)
        if attended is None:
            given = (layer, query, key, value, kv_cache, attn_metadata, output)
            found: Tensor = self._inner.forward(*given, *rest, **others)
            return found
        output.copy_(attended)
        return output


def _slots(paged: PagedCache, job: Job, rows: Rows) -> Tensor:
    """Of everything up to a job's last row."""
    return paged.slots(job.blocks, np.arange(rows[-1] + 1))
