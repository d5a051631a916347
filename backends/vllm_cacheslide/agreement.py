"""What ranks of a tensor-parallel engine, and answers to one prompt, have to know of each other.

In: this rank's trouble, with jobs or altogether. Out: the same on every rank, so that all of them
fall back together. A rank that prefilled by itself would wait for the others in its first
reduction, for ever.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from vllm.distributed.parallel_state import get_tp_group

from cacheslide_agents.errors import ReuseError
from vllm_cacheslide.rows import Job


def agree(jobs: Sequence[Job]) -> None:
    """Trouble of a job on one rank becomes trouble on all; all call, with the same jobs."""
    if not jobs:
        return
    told = agreed([job.trouble for job in jobs])
    for job, trouble in zip(jobs, told, strict=True):
        job.trouble = trouble


def fail_together(jobs: list[Job]) -> None:
    """Answers to one prompt share its blocks: what one of them did not fill, the others read."""
    failed = {job.blocks[0]: job.trouble for job in jobs if job.trouble and job.blocks}
    for job in jobs:
        if not job.trouble and job.blocks and job.blocks[0] in failed:
            job.fail(ReuseError(f"it shares blocks with another answer: {failed[job.blocks[0]]}"))


def agreed(troubles: Sequence[str]) -> list[str]:
    """For each of `troubles`, as many on every rank, the first rank's that has any."""
    group = get_tp_group()
    if group.world_size == 1:
        return list(troubles)
    told: list[list[str]] = [[] for _ in range(group.world_size)]
    torch.distributed.all_gather_object(told, list(troubles), group=group.cpu_group)
    return [next(filter(None, each), "") for each in zip(*told, strict=True)]
