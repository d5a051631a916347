"""A prompt that has been prefilled: what its answers go on from, and what is told of it.

In: a request, its plan, a filled working cache. Out: all of that together, held until the answers
are out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from cacheslide_agents.backend import GenerationRequest, Receipt
from cacheslide_agents.pages.base import ContextKey
from cacheslide_agents.pages.lease import Lease
from cacheslide_agents.policies.base import Plan
from torch_cacheslide.cache import WorkingCache
from torch_cacheslide.prefill import Prefilled


@dataclass(frozen=True)
class Prompted:
    """A prompt that has been prefilled; its cache belongs to the runtime's arena.

    `declined` is the plan that the quality guard forbade. As a context manager it ends the lease on
    what the request reuses.
    """

    request: GenerationRequest
    key: ContextKey
    plan: Plan
    prefilled: Prefilled
    cache: WorkingCache
    receipt: Receipt
    lease: Lease | None = None
    declined: Plan | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.lease is not None:
            self.lease.release()
