"""How active rows attend to everything before them in vLLM's paged cache.

In: a batch of rows. Out: a forward context under which the model's own attention layers write the
rows' keys and values to their slots and attend to all that stands before each row.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor
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


def _roomy(config: VllmConfig, most_rows: int) -> VllmConfig:
    """A copy whose buffers hold one request per row, without CUDA graphs."""
    roomy = copy(config)
    roomy.compilation_config = copy(config.compilation_config)
    roomy.compilation_config.cudagraph_mode = CUDAGraphMode.NONE
    roomy.scheduler_config = copy(config.scheduler_config)
    roomy.scheduler_config.max_num_seqs = max(most_rows, config.scheduler_config.max_num_seqs)
    return roomy
