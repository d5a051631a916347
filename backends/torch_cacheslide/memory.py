"""Memory for the keys and values of one request.

In: how many tokens. Out: slots for them, or, where there is not enough, an error that says so.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cacheslide_agents.errors import RequestError
from torch_cacheslide.cache import Arena

_CPU_ALLOCATOR = "DefaultCPUAllocator"
"""In torch's message where the host has no memory; for GPUs torch has an error of its own."""


class NoRoomError(RequestError):
    """The tokens of a request do not fit in memory, however they are computed."""


def slots(arena: Arena, tokens: int, spare: int) -> tuple[Tensor, Tensor]:
    """Keys and values of `arena` for `tokens` and `spare` more.

    `NoRoomError` where the tokens alone do not fit; with `spare` what torch raises, since dense
    they may.
    """
    try:
        return arena.take(tokens + spare)
    except (RuntimeError, MemoryError) as error:
        if spare or not _is_shortage(error):
            raise
        raise NoRoomError(
            f"keys and values of {tokens} tokens, prompt and answers together, do not fit in "
            f"memory ({type(error).__name__}); shorten the prompt, or lower max_tokens, n or "
            "num_beams"
        ) from error


def _is_shortage(error: Exception) -> bool:
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or _CPU_ALLOCATOR in str(error)
