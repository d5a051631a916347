"""A prompt that has been prefilled, and where its answers go on.

In: a request, its plan, a filled working cache. Out: continuations, one answer or several.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from cacheslide_agents.backend import GenerationRequest, Receipt
from cacheslide_agents.pages.base import ContextKey
from cacheslide_agents.pages.lease import Lease
from cacheslide_agents.policies.base import Plan
from torch_cacheslide.branches import Branches
from torch_cacheslide.cache import WorkingCache
from torch_cacheslide.decode import Continuation, Growth
from torch_cacheslide.prefill import Prefilled

if TYPE_CHECKING:
    from torch_cacheslide.runtime import Runtime


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

    def growth(self, runtime: Runtime, width: int) -> Growth:
        """Where answers go on, at most `width` of them at a time."""
        if width == 1:
            return self.continuation(runtime)
        return Branches(
            runtime.stack,
            runtime.rotary,
            self.cache,
            length=len(self.plan.ids),
            position=int(self.plan.positions[-1]) + 1,
        )

    def continuation(self, runtime: Runtime) -> Continuation:
        return Continuation(
            runtime.stack,
            runtime.rotary,
            self.cache,
            length=len(self.plan.ids),
            position=int(self.plan.positions[-1]) + 1,
        )
