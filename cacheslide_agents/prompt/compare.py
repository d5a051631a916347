"""Why a prompt could not be reused: where it differs from an earlier one, and what that costs.

In: two encoded prompts of the same encoder. Out: a `Comparison`: what exact-prefix caching would
reuse and what alignment does, the first difference, the fields that changed by themselves, and what
became of every chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from cacheslide_agents.chunks import Alignment, EncodedPrompt
from cacheslide_agents.prompt.align import align
from cacheslide_agents.prompt.segments import CONTEXT, Segment, segments
from cacheslide_agents.prompt.volatile import Agreement, agreement

Verdict = Literal["equal", "prefix", "move", "align"]
ENOUGH = 0.9
"""Moving fields is good advice if it wins this share of what only alignment keeps."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token at which the prompts differ. `line` counts from 1, in the newer text.

    `shared` is the text just before it, `was` and `now` what follows in either prompt.
    """

    token: int
    chunk: str
    line: int
    shared: str
    was: str
    now: str


@dataclass(frozen=True, slots=True)
class ChangedField:
    """A volatile field ahead of the first other change, and the token of the newer prompt at it."""

    kind: str
    chunk: str
    token: int
    was: str
    now: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """Token counts of the newer prompt. `prefix`: what exact-prefix caching would reuse; `aligned`:
    what alignment reuses; `prefix_if_moved`: about what exact-prefix caching would reuse if the
    `fields` stood behind everything stable.
    """

    tokens: int
    earlier_tokens: int
    prefix: int
    aligned: int
    prefix_if_moved: int
    difference: Difference | None
    fields: tuple[ChangedField, ...]
    segments: tuple[Segment, ...]
    verdict: Verdict

    @property
    def advice(self) -> str:
        """The verdict in a sentence or two."""
        counts = f"{self.prefix} of {self.tokens} tokens"
        if self.verdict == "equal":
            return "The prompts are equal; either way all of it is reused."
        if self.verdict == "prefix":
            return (
                f"Nothing reusable follows the first change: exact-prefix caching ({counts}) "
                "does as well as alignment."
            )
        kinds = " and ".join(dict.fromkeys(field.kind for field in self.fields))
        if self.verdict == "move":
            return (
                f"Move the {kinds} behind the stable text: exact-prefix caching would then reuse "
                f"about {self.prefix_if_moved} tokens instead of {self.prefix}, and alignment "
                f"({self.aligned}) would not be needed."
            )
        moved = (
            f" Moving the {kinds} alone would raise it to about {self.prefix_if_moved}."
            if self.prefix_if_moved > self.prefix
            else ""
        )
        return (
            f"The prompt changed ahead of text that stayed: exact-prefix caching reuses {counts}, "
            f"alignment {self.aligned}.{moved}"
        )


def compare(earlier: EncodedPrompt, newer: EncodedPrompt, *, min_run: int = 16) -> Comparison:
    """Both prompts need `ends`. A shared head or run counts from `min_run` tokens on."""
    found = align(
        newer.ids,
        earlier.ids,
        spans=newer.spans,
        cached_spans=earlier.spans,
        min_run=min_run,
    )
    runs = [run for run in found.runs if run.length >= min_run]
    kept = Alignment(found.length, found.cached_length, tuple(runs))
    fields = agreement(newer.text, earlier.text)
    moved = max(kept.prefix, _prefix_without(newer, fields))
    return Comparison(
        tokens=len(newer.ids),
        earlier_tokens=len(earlier.ids),
        prefix=kept.prefix,
        aligned=kept.matched,
        prefix_if_moved=moved if moved >= min_run else 0,
        difference=_difference(earlier, newer),
        fields=tuple(_changed_fields(newer, fields)),
        segments=segments(earlier, newer, runs, min_run),
        verdict=_verdict(earlier, newer, kept, moved, min_run),
    )


def _verdict(
    earlier: EncodedPrompt, newer: EncodedPrompt, kept: Alignment, moved: int, min_run: int
) -> Verdict:
    if earlier.ids == newer.ids:
        return "equal"
    only_aligned = kept.matched - kept.prefix
    if only_aligned < min_run:
        return "prefix"
    return "move" if moved - kept.prefix >= ENOUGH * only_aligned else "align"


def _prefix_without(newer: EncodedPrompt, fields: Agreement) -> int:
    """Tokens up to the first change that is no volatile field, but for those of such fields."""
    ends = np.asarray(newer.ends)
    before = int(np.searchsorted(ends, fields.stop, side="right"))
    inside = sum(
        int(np.searchsorted(ends, mine.stop)) + 1 - int(np.searchsorted(ends, mine.start, "right"))
        for mine, _ in fields.changed
    )
    return max(0, before - inside)


def _changed_fields(newer: EncodedPrompt, fields: Agreement) -> list[ChangedField]:
    ends = np.asarray(newer.ends)
    found = []
    for mine, theirs in fields.changed:
        token = min(int(np.searchsorted(ends, mine.start, "right")), len(ends) - 1)
        chunk = _chunk_at(newer, token)
        found.append(ChangedField(mine.kind, chunk, token, theirs.text, mine.text))
    return found


def _difference(earlier: EncodedPrompt, newer: EncodedPrompt) -> Difference | None:
    if earlier.ids == newer.ids:
        return None
    pairs = enumerate(zip(earlier.ids, newer.ids, strict=False))
    shorter = min(len(earlier.ids), len(newer.ids))
    token = next((index for index, (old, new) in pairs if old != new), shorter)
    there, here = (prompt.ends[token - 1] if token else 0 for prompt in (earlier, newer))
    return Difference(
        token=token,
        chunk=_chunk_at(newer, token),
        line=newer.text.count("\n", 0, here) + 1,
        shared=newer.text[max(0, here - CONTEXT) : here],
        was=earlier.text[there : there + CONTEXT],
        now=newer.text[here : here + CONTEXT],
    )


def _chunk_at(prompt: EncodedPrompt, token: int) -> str:
    inside = (span.id for span in prompt.spans if span.start <= token < span.stop)
    return next(inside, prompt.spans[-1].id if prompt.spans else "")
