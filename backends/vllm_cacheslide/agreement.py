"""What the ranks of a tensor-parallel engine have to know of each other.

In: this rank's jobs. Out: the same trouble on every rank, so that all of them fall back together. A
rank that prefilled again by itself would wait for the others in its first reduction, for ever.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from vllm.distributed.parallel_state import get_tp_group

from vllm_cacheslide.rows import Job


def agree(jobs: Sequence[Job]) -> None:
    """Trouble of a job on one rank becomes trouble on all; all call, with the same jobs."""
    group = get_tp_group()
    if group.world_size == 1 or not jobs:
        return
    told: list[list[str]] = [[] for _ in range(group.world_size)]
    torch.distributed.all_gather_object(told, [job.trouble for job in jobs], group=group.cpu_group)
    for job, troubles in zip(jobs, zip(*told, strict=True), strict=True):
        job.trouble = next(filter(None, troubles), "")
