"""Torch's intra-op threads.

In: a number that a user gave. Out: the whole process computes with as many, or a clear error.
"""

from __future__ import annotations

import torch

from cacheslide_agents.errors import RequestError

MOST_THREADS = 1024
"""OpenMP ends the process when it cannot start as many threads as it was told to."""


def set_threads(threads: int) -> None:
    if not isinstance(threads, int) or not 1 <= threads <= MOST_THREADS:
        raise RequestError(f"threads={threads!r} must be a whole number from 1 to {MOST_THREADS}")
    torch.set_num_threads(threads)
