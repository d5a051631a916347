"""What every page store offers: contexts go in, layers of keys and values come out.

A page is `PAGE_TOKENS` tokens of one layer, keys and values. Keys are position-free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import time
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from cacheslide_agents.chunks import Span

PAGE_TOKENS = 16
LayerKV = tuple[Tensor, Tensor]
"""Position-free keys and values of one layer, each [kv_heads, tokens, head_dim]."""


@dataclass(frozen=True, slots=True)
class ContextKey:
    """Who may reuse a context: same model bytes and dtype, same tenant, same kind of prompt."""

    fingerprint: str
    namespace: str
    task: str


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


class PageStore(Protocol):
    """Stored contexts under a byte budget. Implementations may be called from several threads."""

    def put(
        self,
        context: StoredContext,
        layers: Sequence[LayerKV],
        residuals: Mapping[int, Tensor] | None = None,
    ) -> bool:
        """Take over the tensors; false when admission refused them (larger than the budget).

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

    def load(self, context: StoredContext, layer: int) -> LayerKV:
        """One layer of a context. `PageError` when a page is missing or torn (a counted miss)."""
        ...

    def residual(self, context: StoredContext, layer: int) -> Tensor | None:
        """Hidden states [first tokens, hidden] after `layer`; `None` where none were stored."""
        ...

    def pin(self, session: str) -> None: ...
    def unpin(self, session: str) -> None: ...
    def clear(self) -> None: ...
    def metrics(self) -> Mapping[str, float]: ...
