"""The shape of a policy, and the plan that the planner makes of it for one request.

A policy is a small frozen dataclass: which caches it needs (`population`), which tokens of a prompt
it reuses (`reuse`), where they stand (`positions`), and which of them it recomputes (`selector`,
with `fusion` and `gate` deciding what becomes of the recomputed keys and values).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
from torch import Tensor

from cacheslide_agents.backend import ChunkOutcome, Outcome
from cacheslide_agents.chunks import Run, Span
from cacheslide_agents.pages.base import ContextKey, LayerKV, StoredContext, TokenRange
from cacheslide_agents.selection.base import LayerSelector, SelectionView, Selector, run_mask
from cacheslide_agents.selection.fusion import Fusion
from cacheslide_agents.selection.gate import Gate


class Population(StrEnum):
    """What must have been stored before a turn can be reused."""

    NONE = "none"
    CONTEXT = "context"
    ISOLATED = "isolated"


class Reuse(StrEnum):
    """Which tokens of the prompt a policy takes from the store."""

    NOTHING = "nothing"
    EXACT_PREFIX = "exact_prefix"
    RUNS = "runs"
    CHUNKS = "chunks"


class Order(StrEnum):
    """Whether a chunk that changed places with another one is reused."""

    RELATIVE = "relative"
    ANY = "any"


@runtime_checkable
class Policy(Protocol):
    """Knobs are dataclass fields; these properties are all the planner and executor look at."""

    @property
    def name(self) -> str: ...
    @property
    def population(self) -> Population: ...
    @property
    def reuse(self) -> Reuse: ...
    @property
    def min_run(self) -> int:
        """Tokens that a run must have to be worth taking."""
        ...

    @property
    def order(self) -> Order: ...
    @property
    def selector(self) -> Selector | LayerSelector | None: ...
    @property
    def fusion(self) -> Fusion: ...
    @property
    def gate(self) -> Gate | None: ...
    @property
    def may_decline(self) -> bool:
        """Whether plain prefix reuse may be taken instead when the cost model finds it cheaper."""
        ...

    @property
    def ccpe(self) -> bool:
        """Whether chunks are first computed at their task's canonical positions, if known."""
        ...

    def positions(self, spans: tuple[Span, ...], length: int) -> npt.NDArray[np.int64]:
        """Where each prompt token stands [n]; `arange(n)` unless a schema leaves gaps."""
        ...

    def reasons(self, spans: tuple[Span, ...]) -> Mapping[str, str]:
        """What the policy itself has to say of chunks, by id."""
        ...


@dataclass(frozen=True)
class PlannedRun:
    """Reused tokens [start, start + length), taken from `source` at `cached_start`.

    Keys in a store are position-free, so `shift` is for the receipt only.
    """

    run: Run
    source: StoredContext


@dataclass(frozen=True)
class Plan:
    """How one request will be prefilled.

    `active` bool [n]: tokens known beforehand to be run through the layers (the update, the last
    token, static correction tokens). With a `narrow` selector layers 0..narrow.layer run for all
    tokens of [head, n) and the correction tokens are chosen there. `head`: the length of the
    common head, whose left context is unchanged. `exact` bool [n] holds after this prefill.
    The last prompt token is always active and never in a run: `hit & active` are the corrections.

    `outcome`, always of the prefill this plan asks for:

    | outcome | meaning |
    | --- | --- |
    | `cold` | nothing is reused: nothing was cached, or no run of it is long enough |
    | `hit` | every `Role.REUSE` chunk is reused whole (corrections count as reused) |
    | `partial` | something is reused, but a `Role.REUSE` chunk is new, changed or cut |
    | `declined` | more could be reused, but the exact prefix alone (or nothing) is cheaper |
    | `fallback` | reuse went wrong; dense prefill answers |

    A prompt without `Role.REUSE` chunks counts as one such chunk. Whether the very last token was
    cached is of no account: it is computed in any case.
    """

    ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    runs: tuple[PlannedRun, ...]
    active: npt.NDArray[np.bool_]
    exact: npt.NDArray[np.bool_]
    head: int
    policy: Policy
    narrow: LayerSelector | None
    view: SelectionView | None
    outcome: Outcome
    reason: str
    probe_layer_tokens: int
    spans: tuple[Span, ...]
    chunk_reasons: Mapping[str, str]
    vanished: tuple[ChunkOutcome, ...] = ()

    @cached_property
    def hit(self) -> npt.NDArray[np.bool_]:
        """[n], true where a token is taken from the store (and maybe corrected)."""
        return run_mask([planned.run for planned in self.runs], len(self.ids))


class ContextSource(Protocol):
    """What a planner asks of a page store, which `pages.base.PageStore` describes in full."""

    def find(self, key: ContextKey, session: str | None = None) -> list[StoredContext]: ...
    def find_isolated(
        self, key: ContextKey, ids: npt.NDArray[np.int64]
    ) -> StoredContext | None: ...
    def load(
        self, context: StoredContext, layer: int, ranges: Sequence[TokenRange] | None = None
    ) -> LayerKV: ...


Probe = Callable[[Plan, npt.NDArray[np.int64], int], Tensor]
"""`probe(draft, rows, layer)`: position-free keys [rows, kv_heads, head_dim] that the prompt tokens
`rows` get at `layer` when only they run through layers 0..layer, over the runs of `draft`."""
