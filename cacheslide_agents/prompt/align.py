"""Lines a prompt up with a cached one: an incremental build of the prompt, token by token.

In: the token ids of both and, if known, their chunk spans. Out: an `Alignment`: its runs can be
reused, its edits must be computed. Never wrong, whatever the text: tokens are compared before a
run is kept. Work is bounded: very repetitive text may cost hits, not time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from cacheslide_agents.chunks import Alignment, Edit, Run, Span
from cacheslide_agents.errors import RequestError
from cacheslide_agents.prompt.gaps import GapSearch
from cacheslide_agents.prompt.grams import gram_hashes, group_grams
from cacheslide_agents.prompt.masks import common_head
from cacheslide_agents.prompt.votes import Pairs

Ints = npt.NDArray[np.int64]
TokenIds = Sequence[int] | Ints


def align(
    ids: TokenIds,
    cached_ids: TokenIds,
    *,
    spans: Sequence[Span] = (),
    cached_spans: Sequence[Span] = (),
    min_run: int = 16,
) -> Alignment:
    """The runs of at least `min_run` tokens that the prompt shares, in order, with the cached one.

    Runs are maximal, ascending and disjoint on both sides. The common head is a run however short
    it is: what came before it has not changed, so it is as exact as it was when stored and needs no
    correction (prefix caching would keep it too). A shorter run elsewhere is not worth its seam.

    Head and tail are trimmed, then the gap between them is searched: grams of `min_run` tokens vote
    for shifts, as do chunks with equal digests; the runs at those shifts are compared token by
    token; the heaviest chain of them that keeps its order on both sides stays; and so on in the
    gaps that it leaves. Text moved to another place is therefore an edit unless it outweighs what
    it crosses. Spans are hints: a wrong one costs time, never a token.

    Raises `RequestError` for ids that are no flat sequence of integers and for `min_run` below 1.
    """
    new, old = _tokens(ids, "ids"), _tokens(cached_ids, "cached_ids")
    _check_min_run(min_run)
    head, tail = _head_and_tail(new, old, min_run)
    gap = Edit(head, len(new) - tail, head, len(old) - tail)
    found = GapSearch(new, old, gap, _chunk_pairs(spans, cached_spans), min_run).runs()
    runs = [Run(0, 0, head), *found, Run(gap.stop, gap.cached_stop, tail)]
    runs = [run for run in runs if run.length]
    return Alignment(len(new), len(old), _joined(new, old, runs))


def shared_tokens(ids: TokenIds, cached_ids: TokenIds, *, min_run: int = 16) -> int:
    """How many tokens `align` could match at most; several times cheaper, to rank many contexts.

    Counts the tokens that lie in a gram of `min_run` tokens known to the other side, in any order.
    """
    new, old = _tokens(ids, "ids"), _tokens(cached_ids, "cached_ids")
    _check_min_run(min_run)
    head, tail = _head_and_tail(new, old, min_run)
    new, old = new[head : len(new) - tail], old[head : len(old) - tail]
    grams, cached_grams = gram_hashes(new, min_run), gram_hashes(old, min_run)
    groups = group_grams(grams, cached_grams)
    common = np.repeat((groups.in_new > 0) & (groups.in_old > 0), groups.in_new + groups.in_old)
    rows = groups.where[common]
    in_new = rows < len(grams)
    covered = _covered(rows[in_new], len(new), min_run)
    cached_covered = _covered(rows[~in_new] - len(grams), len(old), min_run)
    return head + tail + min(covered, cached_covered)


def _covered(starts: Ints, length: int, width: int) -> int:
    """How many of `length` tokens lie in one of the windows of `width` tokens from `starts`."""
    steps = np.zeros(length + 1, dtype=np.int64)
    steps[starts] += 1
    steps[starts + width] -= 1
    return int(np.count_nonzero(steps.cumsum()))


def _tokens(ids: TokenIds, name: str) -> Ints:
    tokens = np.asarray(ids)
    if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
        raise RequestError(
            f"{name} is an array of {tokens.dtype} with shape {tokens.shape}; "
            "pass one flat sequence of integer token ids"
        )
    return tokens.astype(np.int64, copy=False)


def _check_min_run(min_run: int) -> None:
    if min_run < 1:
        raise RequestError(f"min_run={min_run} must be at least 1")


def _head_and_tail(new: Ints, old: Ints, min_run: int) -> tuple[int, int]:
    """Lengths of the common head and, after it, of the common tail.

    A tail shorter than `min_run` counts as none, lest it take tokens from a run that is kept.
    """
    head = common_head(new, old)
    tail = _common_tail(new[head:], old[head:])
    return head, tail if tail >= min_run else 0


def _common_tail(left: Ints, right: Ints) -> int:
    return common_head(left[::-1], right[::-1])


def _chunk_pairs(spans: Sequence[Span], cached_spans: Sequence[Span]) -> Pairs:
    """Tokens of chunks with equal digests and lengths, the k-th such chunk with the k-th cached."""
    cached: dict[tuple[str, int], list[int]] = defaultdict(list)
    for span in reversed(cached_spans):
        cached[span.digest, len(span)].append(span.start)
    i, j = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
    for span in spans:
        starts = cached[span.digest, len(span)]
        if starts:
            i.append(np.arange(span.start, span.stop))
            j.append(np.arange(len(span)) + starts.pop())
    return np.concatenate(i), np.concatenate(j)


def _joined(new: Ints, old: Ints, runs: Sequence[Run]) -> tuple[Run, ...]:
    """`runs` without those whose tokens the run before can take over: it then reads on where it
    was, a seam is saved, and the run after may begin earlier.
    """
    joined: list[Run] = []
    last, room = Run(0, 0, 0), False
    for run, after in pairwise([*runs, Run(len(new), len(old), 0)]):
        if joined and (last.stop == run.start or last.cached_stop == run.cached_start):
            more = common_head(
                new[last.stop : after.start], old[last.cached_stop : after.cached_start]
            )
            if more >= run.length:
                joined[-1] = last = Run(last.start, last.cached_start, last.length + more)
                room = True
                continue
        if room:
            less = _common_tail(
                new[last.stop : run.start], old[last.cached_stop : run.cached_start]
            )
            run = Run(run.start - less, run.cached_start - less, run.length + less)
        joined.append(run)
        last, room = run, False
    return tuple(joined)
