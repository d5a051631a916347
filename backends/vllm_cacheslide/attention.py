"""How active rows attend to everything before them in vLLM's paged cache.

In: a batch of rows. Out: a forward context under which the model's own attention layers write the
rows' keys and values to their slots and attend to all that stands before each row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import copy
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from vllm.config import CUDAGraphMode
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import AttentionMetadata, CommonAttentionMetadata

from vllm_cacheslide.paging import PagedCache
from vllm_cacheslide.rows import Batch

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.model_executor.layers.attention import Attention
    from vllm.v1.kv_cache_interface import AttentionSpec


class RowAttention(Protocol):
    """`entered(batch, slots, positions)`: layers called inside compute the batch's rows."""

    def entered(self, batch: Batch, slots: Tensor, positions: Tensor) -> Any: ...


class Runs:
    """The engine's own kernels. Every run of consecutive rows poses as a request.

    Its query is the run, its sequence ends with the run, its blocks are the real request's: the
    causal mask of a chunked prefill is then exactly "keys up to the row itself".
    """

    def __init__(
        self,
        config: VllmConfig,
        attentions: list[Attention],
        spec: AttentionSpec,
        paged: PagedCache,
        most_rows: int,
    ) -> None:
        self._config, self._paged = config, paged
        self._names = [attention.layer_name for attention in attentions]
        kernel_spec = spec.copy_with_new_block_size(paged.kernel_block_size)
        builder = attentions[0].attn_backend.get_builder_cls()
        # A builder of our own: the runner's has buffers sized for the requests of one step.
        self._builder = builder(kernel_spec, self._names, _roomy(config, most_rows), paged.device)

    @contextmanager
    def entered(self, batch: Batch, slots: Tensor, positions: Tensor) -> Iterator[None]:
        with set_forward_context(
            dict.fromkeys(self._names, self.metadata(batch, slots, positions)),
            self._config,
            num_tokens=len(batch),
            slot_mapping=dict.fromkeys(self._names, slots),
            cudagraph_runtime_mode=CUDAGraphMode.NONE,
            skip_compiled=True,
        ):
            yield

    def metadata(self, batch: Batch, slots: Tensor, positions: Tensor) -> AttentionMetadata:
        """What the layers' attention is told of the batch."""
        made: AttentionMetadata = self._builder.build(0, self._common(batch, slots, positions))
        return made

    def _common(self, batch: Batch, slots: Tensor, positions: Tensor) -> CommonAttentionMetadata:
        lengths = np.array([run.stop - run.start for run in batch.runs])
        starts = torch.from_numpy(np.concatenate(([0], np.cumsum(lengths))).astype(np.int32))
        ends = torch.tensor([run.stop for run in batch.runs], dtype=torch.int32)
        device = self._paged.device
        return CommonAttentionMetadata(
            query_start_loc=starts.to(device),
            query_start_loc_cpu=starts,
            seq_lens=ends.to(device),
            num_reqs=len(batch.runs),
            num_actual_tokens=len(batch),
            max_query_len=int(lengths.max()),
            max_seq_len=int(ends.max()),
            block_table_tensor=self._block_table(batch).to(device),
            slot_mapping=slots,
            causal=True,
            positions=positions,
            is_prefilling=torch.ones(len(batch.runs), dtype=torch.bool),
            seq_lens_cpu_upper_bound=ends,
            req_idx=self._owners(batch),
        )

    @staticmethod
    def _owners(batch: Batch) -> np.ndarray:
        """int64 [runs]: the job each belongs to; runs of one job share their keys."""
        numbers = {job: number for number, (job, _) in enumerate(batch.parts)}
        return np.array([numbers[run.job] for run in batch.runs])

    def _block_table(self, batch: Batch) -> Tensor:
        """int32 [runs, blocks of the longest job]."""
        tables = {job: self._paged.kernel_blocks(job.blocks) for job, _ in batch.parts}
        table = np.zeros((len(batch.runs), max(map(len, tables.values()))), dtype=np.int32)
        for row, run in enumerate(batch.runs):
            blocks = tables[run.job]
            table[row, : len(blocks)] = blocks
        return torch.from_numpy(table)


class Masked:
    """The same by PyTorch's SDPA over gathered keys with an explicit mask; slow, for checks."""

    def __init__(self, runs: Runs, attentions: list[Attention], paged: PagedCache) -> None:
        self._runs, self._attentions, self._paged = runs, attentions, paged

    @contextmanager
    def entered(self, batch: Batch, slots: Tensor, positions: Tensor) -> Iterator[None]:
        with self._runs.entered(batch, slots, positions), ExitStack() as swapped:
            for layer, attention in enumerate(self._attentions):
                swapped.callback(setattr, attention, "impl", attention.impl)
                attention.impl = _Sdpa(attention.impl, self._attend(batch, layer))
            yield

    def _attend(self, batch: Batch, layer: int) -> Callable[[Tensor, float], Tensor]:
        def attend(queries: Tensor, scale: float) -> Tensor:
            parts: list[Tensor] = []
            done = 0
            for job, rows in batch.parts:
                mine = queries[done : done + len(rows)]
                done += len(rows)
                keys, values = self._paged.read(
                    layer, self._paged.slots(job.blocks, np.arange(rows[-1] + 1))
                )
                mask = torch.arange(len(keys)) <= torch.from_numpy(rows)[:, None]
                attended = scaled_dot_product_attention(
                    mine.transpose(0, 1)[None],
                    keys.transpose(0, 1)[None],
                    values.transpose(0, 1)[None],
                    attn_mask=mask[None, None].to(keys.device),
                    scale=scale,
                    enable_gqa=True,
                )
                parts.append(attended[0].transpose(0, 1))
            return torch.cat(parts)

        return attend


class _Sdpa:
    """An attention implementation that writes like `inner` and attends by `attend`."""

    def __init__(self, inner: Any, attend: Callable[[Tensor, float], Tensor]) -> None:
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
        *_: object,
        **__: object,
    ) -> Tensor:
        output.copy_(self._attend(query, self._inner.scale))
        return output


def _roomy(config: VllmConfig, most_rows: int) -> VllmConfig:
    """A copy whose buffers hold one request per row, without CUDA graphs."""
    roomy = copy(config)
    roomy.compilation_config = copy(config.compilation_config)
    roomy.compilation_config.cudagraph_mode = CUDAGraphMode.NONE
    roomy.scheduler_config = copy(config.scheduler_config)
    roomy.scheduler_config.max_num_seqs = max(most_rows, config.scheduler_config.max_num_seqs)
    return roomy
