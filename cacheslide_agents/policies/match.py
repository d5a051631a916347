"""What of a prompt lies in the store: the runs to take, and what changed between them.

In: the prompt's tokens and spans, stored contexts or chunks stored alone. Out: a `Match`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from cacheslide_agents.chunks import Edit, Role, Run, Span
from cacheslide_agents.pages.base import ContextKey, StoredContext
from cacheslide_agents.policies.base import ContextSource, PlannedRun
from cacheslide_agents.prompt.align import align
from cacheslide_agents.prompt.masks import common_head, leading
from cacheslide_agents.selection.base import run_mask

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Match:
    """`runs` in prompt order, `edits` what lies between them (also where nothing lies between two
    runs that were not neighbours). `source` is the one cached context, `None` for chunks alone.
    """

    runs: tuple[PlannedRun, ...]
    edits: tuple[Edit, ...]
    source: StoredContext | None

    @classmethod
    def nothing(cls, length: int, source: StoredContext | None = None) -> Self:
        """No run at all in a prompt of `length` tokens."""
        return cls((), (Edit(0, length, 0, 0 if source is None else len(source)),), source)

    @property
    def tokens(self) -> int:
        return sum(planned.run.length for planned in self.runs)

    @property
    def head(self) -> int:
        """Tokens at the start that stand as they stood, with nothing before them."""
        first = self.runs[0].run if self.runs else None
        return first.length if first and first.start == first.cached_start == 0 else 0

    def mask(self, length: int) -> npt.NDArray[np.bool_]:
        """[length], true inside a run."""
        return run_mask([planned.run for planned in self.runs], length)

    def without_last(self, length: int) -> Match:
        """The same without the last of `length` prompt tokens, which is always computed."""
        return Match(_cut(self.runs, length - 1), self.edits, self.source)


def match_context(
    ids: Ids, spans: Sequence[Span], source: StoredContext, *, min_run: int, any_order: bool
) -> Match:
    """Runs of at least `min_run` tokens shared with `source`; `any_order` adds moved chunks."""
    found = align(ids, source.ids, spans=spans, cached_spans=source.spans, min_run=min_run)
    runs = [run for run in found.runs if run.length >= min_run]
    if any_order:
        runs += _moved(ids, spans, source, runs, min_run)
        runs.sort(key=lambda run: run.start)
    edits = _edits(runs, Run(len(ids), len(source), 0))
    return Match(tuple(PlannedRun(run, source) for run in runs), edits, source)


def match_chunks(
    ids: Ids, spans: Sequence[Span], key: ContextKey, store: ContextSource, *, min_run: int
) -> Match:
    """REUSE chunks of at least `min_run` tokens whose tokens were stored alone.

    A run that does not start the prompt has a left context its cache never saw: an edit precedes
    it.
    """
    runs: list[PlannedRun] = []
    edits: list[Edit] = []
    here = 0
    for span in spans:
        if span.role is not Role.REUSE or len(span) < min_run:
            continue
        found = store.find_isolated(key, ids[span.start : span.stop])
        if found is not None:
            if span.start:
                edits.append(Edit(here, span.start, 0, 0))
            runs.append(PlannedRun(Run(span.start, 0, len(span)), found))
            here = span.stop
    if here < len(ids):
        edits.append(Edit(here, len(ids), 0, 0))
    return Match(tuple(runs), tuple(edits), None)


def match_prefix(ids: Ids, contexts: Iterable[StoredContext], *, min_run: int) -> Match | None:
    """The longest head, of at least `min_run` tokens, that some context holds exactly."""
    best: PlannedRun | None = None
    longest = min_run - 1
    for context in contexts:
        # one token tells of most contexts that their head is no longer than the best so far
        if min(len(ids), len(context)) <= longest or ids[longest] != context.ids[longest]:
            continue
        length = common_head(ids, context.ids)
        length = min(length, leading(context.exact[:length]))
        if length > longest:
            best, longest = PlannedRun(Run(0, 0, length), context), length
    if best is None:
        return None
    edits = _edits([best.run], Run(len(ids), len(best.source), 0))
    return Match((best,), edits, best.source)


def _moved(
    ids: Ids, spans: Sequence[Span], source: StoredContext, runs: Sequence[Run], min_run: int
) -> list[Run]:
    """Whole chunks outside `runs` that `source` holds elsewhere, outside `runs` as well."""
    here = run_mask(runs, len(ids))
    there = run_mask([Run(run.cached_start, run.start, run.length) for run in runs], len(source))
    cached = {span.digest: span for span in reversed(source.spans)}
    moved: list[Run] = []
    for span in spans:
        old = cached.get(span.digest)
        if old is None or len(span) < min_run or len(old) != len(span):
            continue
        new_slice, old_slice = slice(span.start, span.stop), slice(old.start, old.stop)
        if here[new_slice].any() or there[old_slice].any():
            continue
        if (ids[new_slice] == source.ids[old_slice]).all():
            moved.append(Run(span.start, old.start, len(span)))
            there[old_slice] = True
    return moved


def _edits(runs: Sequence[Run], end: Run) -> tuple[Edit, ...]:
    """Gaps before each run and before `end`; runs may stand in any order on the cached side."""
    edits: list[Edit] = []
    before = Run(0, 0, 0)
    furthest = 0
    for run in (*runs, end):
        if run.start > before.stop or run.cached_start != before.cached_stop:
            edits.append(Edit(before.stop, run.start, furthest, max(furthest, run.cached_start)))
        before, furthest = run, max(furthest, run.cached_stop)
    return tuple(edits)


def _cut(runs: Sequence[PlannedRun], stop: int) -> tuple[PlannedRun, ...]:
    kept = []
    for planned in runs:
        run = planned.run
        length = min(run.stop, stop) - run.start
        if length > 0:
            kept.append(PlannedRun(Run(run.start, run.cached_start, length), planned.source))
    return tuple(kept)
