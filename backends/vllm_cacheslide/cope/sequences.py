"""What attention has to know of a step's requests, whatever layer it runs in.

In: vLLM's metadata of a step, or of a batch of ours in which several runs of rows belong to one
request. Out: sequences, each with its rows and the blocks of everything they may look at.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionMetadata, AttentionMetadataBuilder

from cacheslide_agents.position.profile import CanonicalRows

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.kv_cache_interface import AttentionSpec


@dataclass(frozen=True, eq=False)
class Sequence:
    """Queries [`start`, `stop`) of a step over the first `length` tokens of `blocks`.

    `rows` int64 [stop - start], ascending: the queries' own places among those tokens. `canonical`:
    rows, of this step or others, that count what stands before them at its usual mass (CCPE).
    """

    start: int
    stop: int
    length: int
    rows: Tensor
    blocks: Tensor
    canonical: CanonicalRows | None = None


@dataclass(frozen=True, eq=False)
class Sequences(AttentionMetadata):
    """All of a step."""

    each: tuple[Sequence, ...]


class SequencesBuilder(AttentionMetadataBuilder[Sequences]):
    """Holds nothing between steps. It waits for the device only where the host has no lengths."""

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._block_size = kv_cache_spec.block_size

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Sequences:
        """Requests next to each other with the same `req_idx` are parts of one sequence."""
        common = common_attn_metadata
        starts = common.query_start_loc_cpu.numpy()
        ends = _lengths(common)
        owners = common.req_idx if common.req_idx is not None else np.arange(common.num_reqs)
        made = []
        for first, last in _groups(owners[: common.num_reqs]):
            start, stop, length = int(starts[first]), int(starts[last]), int(ends[last - 1])
            if stop == start:  # a place in the batch that is not taken
                continue
            rows = np.concatenate(
                [
                    np.arange(ends[each] - (starts[each + 1] - starts[each]), ends[each])
                    for each in range(first, last)
                ]
            )
            blocks = -(-length // self._block_size)
            table = common.block_table_tensor[last - 1, :blocks].long()
            places = torch.from_numpy(rows).to(self.device, torch.int64, non_blocking=True)
            made.append(Sequence(start, stop, length, places, table))
        return Sequences(tuple(made))


def _lengths(common: CommonAttentionMetadata) -> np.ndarray:
    """Tokens of each request; the bound on the host is exact without speculative decoding."""
    known = common.seq_lens_cpu_upper_bound
    lengths: np.ndarray = (common.seq_lens if known is None else known).cpu().numpy()
    return lengths


def _groups(owners: np.ndarray) -> Iterator[tuple[int, int]]:
    """[first, last) of every stretch of equal neighbours."""
    borders = np.flatnonzero(np.diff(owners)) + 1
    return pairwise([0, *borders.tolist(), len(owners)])
