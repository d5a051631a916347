"""What is said about a plan: an outcome for the request, a reason for every chunk.

In: which tokens are reused, the prompt's spans and those of the cached context. Out: `Outcome`,
reasons by chunk id, and the cached chunks that vanished.

| reason of a chunk | meaning |
| --- | --- |
| (none) | reused whole |
| `cold` | nothing like it is stored (never was, or was evicted) |
| `disabled` | the policy reuses nothing |
| `new` | the cached context has no chunk of this id or text |
| `changed` | the cached context has this chunk with another text |
| `moved` | the same text is cached, but in another order among the chunks |
| `seam` | reused but for tokens at its borders, which tokenise differently there |
| `short` | fewer tokens than the policy's `min_run` |
| `after_change` | the same text is cached, but this policy stops at the first change |
| `inexact` | the same text is cached, but its keys and values are approximate |
| `recompute` | its role is `Role.RECOMPUTE`, and this policy goes by roles |
| `overflow` | longer than its slot in the schema; what follows moves |
| `prefix_cheaper` | reusable, but plain prefix reuse costs less |
| `last_token` | the prompt's last token, which is always computed |
| `fallback` | reuse went wrong; the receipt's own reason says how |
| `empty` | no tokens |
| `removed` | of a vanished chunk |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from cacheslide_agents.backend import ChunkOutcome, Outcome
from cacheslide_agents.chunks import Role, Run, Span
from cacheslide_agents.policies.match import Match
from cacheslide_agents.prompt.masks import common_head
from cacheslide_agents.selection.base import run_mask

Mask = npt.NDArray[np.bool_]
PREFIX_CHEAPER = "prefix_cheaper"


def outcome_of(hit: Mask, spans: Sequence[Span]) -> Outcome:
    """`cold`, `hit` or `partial` as defined at `policies.base.Plan`; `hit` bool [n]."""
    if not hit.any():
        return "cold"
    needed = hit.copy()
    needed[-1] = True
    wanted = [span for span in spans if span.role is Role.REUSE and len(span)]
    if not wanted:
        return "hit" if needed.all() else "partial"
    whole = all(needed[span.start : span.stop].all() for span in wanted)
    return "hit" if whole else "partial"


def same_reason(spans: Sequence[Span], reason: str) -> dict[str, str]:
    """Every chunk has one reason; empty ones are just empty."""
    return {span.id: reason if len(span) else "empty" for span in spans}


def reasons_in_context(
    hit: Mask, spans: Sequence[Span], match: Match, min_run: int
) -> dict[str, str]:
    """Why each chunk was not, or not wholly, found in the cached context."""

    def known(span: Span, found: int) -> str:
        if found:
            return "seam"
        return "short" if len(span) < min_run else "moved"

    return _compare(hit, spans, match, known)


def reasons_after_prefix(
    ids: npt.NDArray[np.int64], hit: Mask, spans: Sequence[Span], match: Match
) -> dict[str, str]:
    """The same for reuse that stops at the end of the exact prefix."""
    assert match.source is not None
    common = common_head(ids, match.source.ids)

    def known(span: Span, found: int) -> str:
        return "inexact" if span.start < common else "after_change"

    return _compare(hit, spans, match, known)


def reasons_by_chunk(hit: Mask, spans: Sequence[Span], min_run: int) -> dict[str, str]:
    """The same for chunks stored alone."""

    def why(span: Span) -> str:
        if span.role is Role.RECOMPUTE:
            return "recompute"
        return "short" if len(span) < min_run else "cold"

    return {span.id: _unless_whole(hit, span, lambda span, _: why(span)) for span in spans}


def vanished_chunks(spans: Sequence[Span], match: Match) -> tuple[ChunkOutcome, ...]:
    """Chunks of the cached context that have no counterpart here, by id, text or tokens."""
    source = match.source
    if source is None:
        return ()
    runs = [planned.run for planned in match.runs]
    kept = run_mask([Run(run.cached_start, run.start, run.length) for run in runs], len(source))
    ids, digests = {span.id for span in spans}, {span.digest for span in spans}
    return tuple(
        ChunkOutcome(old.id, old.role, len(old), "vanished", None, 0, 0, "removed")
        for old in source.spans
        if len(old)
        and old.id not in ids
        and old.digest not in digests
        and not kept[old.start : old.stop].any()
    )


def _compare(
    hit: Mask, spans: Sequence[Span], match: Match, known: Callable[[Span, int], str]
) -> dict[str, str]:
    """`known` words the reason of a chunk whose text the cached context has."""
    cached = match.source.spans if match.source is not None else ()
    ids, digests = {span.id for span in cached}, {span.digest for span in cached}

    def why(span: Span, found: int) -> str:
        if span.digest in digests:
            return known(span, found)
        return "changed" if found or span.id in ids else "new"

    return {span.id: _unless_whole(hit, span, why) for span in spans}


def _unless_whole(hit: Mask, span: Span, why: Callable[[Span, int], str]) -> str:
    """No reason for a chunk that is reused whole; the last prompt token is of no account."""
    if not len(span):
        return "empty"
    needed = len(span) - (span.stop == len(hit))
    if not needed:
        return "last_token"
    found = int(hit[span.start : span.stop].sum())
    return "" if found == needed else why(span, found)


def reasons_declined(plain: Mapping[str, str], hit: Mask, spans: Sequence[Span]) -> dict[str, str]:
    """Reasons `plain` of prefix reuse, but for chunks that could have been reused: `hit` [n]."""
    touched = {span.id for span in spans if hit[span.start : span.stop].any()}
    return {
        id: PREFIX_CHEAPER if reason and id in touched else reason for id, reason in plain.items()
    }
