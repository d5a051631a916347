"""What every page store offers: contexts go in, layers of keys and values come out.

A page is `PAGE_TOKENS` tokens of one layer, keys and values; a block is that column of pages
through all layers, and what a store manages. Keys are position-free: a block serves anywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from time import time
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
from torch import Tensor

from cacheslide_agents.chunks import Span
from cacheslide_agents.pages.lease import Lease

PAGE_TOKENS = 16
LayerKV = tuple[Tensor, Tensor]
"""Position-free keys and values of one layer, each [kv_heads, tokens, head_dim]."""
TokenRange = tuple[int, int]
"""First token and the one after the last, counted in the stored context."""


@dataclass(frozen=True, slots=True)
class ContextKey:
    """Who may reuse a context: same model bytes and dtype, same tenant, same kind of prompt."""

    fingerprint: str
    namespace: str
    task: str

    @property
    def tenant(self) -> str:
        """What stands before the namespace's first slash: servers put the namespaces that their
        clients name under the client's own."""
        return self.namespace.partition("/")[0]


@dataclass(frozen=True, eq=False)
class StoredContext:
    """The tokens of one stored request (or of one chunk computed alone, `isolated`).

    `ids` int64 [n]; `exact` bool [n], false where K/V were computed on reused, approximate context.
    """

    key: ContextKey
    ids: npt.NDArray[np.int64]
    exact: npt.NDArray[np.bool_]
    spans: tuple[Span, ...] = ()
    session: str | None = None
    isolated: bool = False
    created: float = field(default_factory=time)

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, eq=False, slots=True)
class ReusedRun:
    """Tokens of a new context that were reused from a stored one.

    Tokens `start` to `start + length` of the new context came from `cached_start` on of `source`.
    `corrected` bool [length]: keys and values recomputed and to be stored instead of the source's;
    all the others are the source's, bit for bit. (`refresh="never"`: nothing is corrected.)
    """

    source: StoredContext
    start: int
    cached_start: int
    length: int
    corrected: npt.NDArray[np.bool_]


@runtime_checkable
class PageStore(Protocol):
    """Stored contexts under a byte budget. Implementations may be called from several threads."""

    def put(
        self,
        context: StoredContext,
        layers: Sequence[LayerKV],
        residuals: Mapping[int, Tensor] | None = None,
        reused: Sequence[ReusedRun] = (),
        lease: Lease | None = None,
    ) -> bool:
        """Keep a context; false when admission refused it, or a source of `reused` is gone.

        `layers` are [kv_heads, tokens, head_dim] of the whole context. Of `reused` runs only the
        corrected tokens are read from them: what stands at the others may be anything. Runs do not
        overlap. The caller holds a lease on the sources and names it here, so that it does not
        count as a reader that keeps corrections from being written in place. Sources that the new
        context supersedes (same session) are gone afterwards.

        `residuals[layer]` [first tokens, hidden] are hidden states after `layer`: checkpoints that
        let a promoting gate start a token in mid-model. Tokens that were generated have none. They
        count in the budget.
        """
        ...

    def find(self, key: ContextKey, session: str | None = None) -> list[StoredContext]:
        """In-context entries of `key`: those of `session` first, then newest first."""
        ...

    def find_isolated(self, key: ContextKey, ids: npt.NDArray[np.int64]) -> StoredContext | None:
        """The entry of a chunk computed alone with exactly these tokens."""
        ...

    def load(
        self, context: StoredContext, layer: int, ranges: Sequence[TokenRange] | None = None
    ) -> LayerKV:
        """One layer of a context, or of the tokens of `ranges` one after the other.

        In host memory or where they were put; nobody may write to them. `PageError` when a page is
        missing or torn (a counted miss). Only the pages of `ranges` are read.
        """
        ...

    def lease(self, contexts: Iterable[StoredContext]) -> Lease:
        """A context manager: until its end none of `contexts` leaves the store or is corrected.

        `PageError` when one is gone already (a counted miss).
        """
        ...

    def in_memory(self, context: StoredContext) -> bool:
        """Whether no page of `context` would have to be read from SSD; a hint for loaders."""
        ...

    def residual(self, context: StoredContext, layer: int) -> Tensor | None:
        """Hidden states [first tokens, hidden] after `layer`; `None` where none were stored."""
        ...

    def pin(self, session: str, namespace: str = "default") -> None: ...
    def unpin(self, session: str, namespace: str = "default") -> None: ...
    def clear(self) -> None:
        """Forget every context; `StoreError` when those on SSD may be there again later."""
        ...

    def flush(self) -> None:
        """Write what is not on SSD yet and wait for it; nothing to do without an SSD tier."""
        ...

    def close(self) -> None:
        """Flush, and let go of memory, files and locks; contexts on SSD stay for the next open."""
        ...

    def metrics(self) -> Mapping[str, float]: ...
