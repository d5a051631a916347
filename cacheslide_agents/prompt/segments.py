"""What became of each chunk of a prompt when the next one was sent.

In: two encoded prompts and the runs that alignment reuses. Out: one `Segment` per chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from cacheslide_agents.chunks import EncodedPrompt, Role, Run, Span
from cacheslide_agents.prompt.masks import running_total

SegmentState = Literal["kept", "moved", "changed", "new", "removed"]
CONTEXT = 60
"""Characters of a prompt shown at one place."""


@dataclass(frozen=True, slots=True)
class Segment:
    """What became of one chunk; `kept` of its `tokens` are reused by alignment, `shift` away.

    `kept` and `moved`: its text stood in the earlier prompt, at the same place or another. A chunk
    whose id is new is `changed` if a run of it is reused, else `new`.
    `begins`: its first words in the prompt, with what the chat template put before them.
    """

    id: str
    role: Role
    state: SegmentState
    tokens: int
    kept: int
    shift: int | None
    begins: str = ""


def segments(
    earlier: EncodedPrompt, newer: EncodedPrompt, runs: Sequence[Run], min_run: int
) -> tuple[Segment, ...]:
    """Chunks of the newer prompt in order, then those of the earlier one that are gone."""
    return (
        *_kept_or_new(earlier, newer, runs, min_run),
        *_removed(earlier, newer, runs, min_run),
    )


def _kept_or_new(
    earlier: EncodedPrompt, newer: EncodedPrompt, runs: Sequence[Run], min_run: int
) -> list[Segment]:
    old_digests = {span.id: span.digest for span in earlier.spans}
    old_starts = {span.digest: span.start for span in reversed(earlier.spans)}
    taken = running_total(_marked(len(newer.ids), [(run.start, run.stop) for run in runs]))

    def segment(span: Span) -> Segment:
        kept = int(taken[span.stop] - taken[span.start])
        shift = next((r.shift for r in runs if r.stop > span.start and r.start < span.stop), None)
        state: SegmentState
        same = old_digests.get(span.id, span.digest) == span.digest
        if same and span.digest in old_starts:
            away = span.start - old_starts[span.digest] if shift is None else shift
            state = "moved" if away else "kept"
        else:
            partly = kept >= min(min_run, len(span)) > 0
            state = "changed" if partly or span.id in old_digests else "new"
        shown = shift if kept else None
        return Segment(span.id, span.role, state, len(span), kept, shown, _begins(newer, span))

    return [segment(span) for span in newer.spans]


def _removed(
    earlier: EncodedPrompt, newer: EncodedPrompt, runs: Sequence[Run], min_run: int
) -> list[Segment]:
    """Chunks of the earlier prompt without a counterpart, by id, text or tokens."""
    ids, digests = ({getattr(s, key) for s in newer.spans} for key in ("id", "digest"))
    places = [(run.cached_start, run.cached_stop) for run in runs]
    taken = running_total(_marked(len(earlier.ids), places))
    return [
        Segment(span.id, span.role, "removed", len(span), 0, None, _begins(earlier, span))
        for span in earlier.spans
        if span.id not in ids
        and span.digest not in digests
        and taken[span.stop] - taken[span.start] < min(min_run, len(span))
    ]


def _begins(prompt: EncodedPrompt, span: Span) -> str:
    start = prompt.ends[span.start - 1] if span.start else 0
    stop = prompt.ends[span.stop - 1] if len(span) else start
    return prompt.text[start : min(stop, start + CONTEXT)]


def _marked(length: int, places: Sequence[tuple[int, int]]) -> npt.NDArray[np.bool_]:
    """[length]: true inside one of `places`."""
    marks = np.zeros(length, dtype=np.bool_)
    for start, stop in places:
        marks[start:stop] = True
    return marks
