"""Fields of a prompt that change from call to call all by themselves.

In: two texts. Out: the time stamps, dates, ids and counters in them, and how far the two texts
agree when such fields are not looked at.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_DAY = r"(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)[a-z]*\.?,?\s+"
_MONTH = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*\.?"
_DATE = (
    r"(?:\d{4}-\d{2}-\d{2}|\d{4}/\d{2}/\d{2}|\d{1,2}[./]\d{1,2}[./](?:\d{4}|\d{2})"
    rf"|(?:{_DAY})?{_MONTH}\s+\d{{1,2}}(?:st|nd|rd|th)?,?\s+\d{{4}}"
    rf"|(?:{_DAY})?\d{{1,2}}(?:st|nd|rd|th)?\s+{_MONTH}\s+\d{{4}})"
)
_ZONE = r"(?:\s?(?:Z|UTC|GMT|[+-]\d{2}:?\d{2})(?![A-Za-z\d]))?"
_TIME = rf"\d{{1,2}}:\d{{2}}(?::\d{{2}}(?:[.,]\d+)?)?(?:\s?[AaPp]\.?[Mm]\b\.?)?{_ZONE}"
_STARTS = r"(?=[\dMTWFSJAOND])"
"""What a date can begin with; looked at first, since it rules most places out."""
_COUNTED = (
    "messages?|tokens?|lines?|items?|entries|characters|chars|steps?|turns?|files?|passages?|"
    "seconds?|minutes?|hours?|days?|requests?|results?|errors?|calls?|left|remaining|used"
)
_NUMBERED = (
    "[Tt]urn|[Ss]tep|[Aa]ttempt|[Tt]rial|[Rr]equest|[Mm]essage|[Ii]teration|[Rr]ound|[Cc]all|"
    "[Ss]ession|[Vv]ersion|[Rr]evision|[Bb]uild|[Rr]un|[Ss]eed|[Nn]once|[Cc]ount|[Tt]otal"
)

_PATTERNS = {
    "uuid": r"(?<![\w-])(?P<field>[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12})(?![\w-])",
    "time stamp": rf"(?<!\d){_STARTS}(?P<field>{_DATE}(?:T|,?\s+(?:at\s+)?){_TIME}"
    rf"|{_DAY}{_MONTH}\s+\d{{1,2}}\s+{_TIME}\s+\d{{4}}|1\d{{9}}(?:\d{{3}}|\.\d+)?)(?!\d)",
    "date": rf"(?<![\d./-]){_STARTS}(?P<field>{_DATE})(?![\d/-])",
    "time": rf"(?<![\d:])(?P<field>{_TIME})(?![\d:])",
    "id": r"(?<![\w-])(?P<field>(?:req|request|call|chatcmpl|msg|run|thread|sess|session|trace|span"
    r"|user|toolu|resp|conv)[-_](?=[A-Za-z-]*\d)[A-Za-z0-9-]{6,}"
    r"|(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{8,64})(?![\w-])",
    "counter": rf"(?<![\w.,])(?P<field>\d[\d,]*)(?=\s?(?:/|of)\s?\d|\s+(?:{_COUNTED})\b|\s?%)"
    rf"|(?:\b(?:{_NUMBERED})s?\s?(?:no\.?|number)?\s?[:=#]?\s?|#|[\w)\]]\s?[:=]\s?)"
    r"(?P<other>\d[\d,]*)(?![\w.]*\w)",
}
_KINDS = {kind: re.compile(pattern) for kind, pattern in _PATTERNS.items()}


@dataclass(frozen=True, slots=True)
class Field:
    """Characters [start, stop) of a text, and what kind of field they look like."""

    kind: str
    start: int
    stop: int
    text: str


@dataclass(frozen=True, slots=True)
class Agreement:
    """Two texts agree up to the characters `stop` and `other_stop`, but for the fields `changed`.

    `changed` pairs a field of the first text with what stands there in the other.
    """

    stop: int
    other_stop: int
    changed: tuple[tuple[Field, Field], ...]


def volatile_fields(text: str) -> list[Field]:
    """Time stamps, dates, times, uuids, ids and counters, in order and without overlaps.

    A bare number is a counter only where its surroundings say so: `label: 12`, `step 12`, `12/40`,
    `12 of 40`, `12 messages`, `12 %`. It is a heuristic, meant for advice and never for reuse.
    """
    taken = bytearray(len(text))
    found: list[Field] = []
    for kind, pattern in _KINDS.items():
        for start, stop in _places(pattern, text):
            if not any(taken[start:stop]):
                taken[start:stop] = b"\x01" * (stop - start)
                found.append(Field(kind, start, stop, text[start:stop]))
    return sorted(found, key=lambda field: field.start)


def agreement(text: str, other: str) -> Agreement:
    """How far two texts are equal when volatile fields of the same kind count as equal."""
    here = there = 0
    changed: list[tuple[Field, Field]] = []
    ends = (_end(text), _end(other))
    pairs = zip([*volatile_fields(text), ends[0]], [*volatile_fields(other), ends[1]], strict=False)
    for mine, theirs in pairs:
        literal, opposite = text[here : mine.start], other[there : theirs.start]
        if literal != opposite or mine.kind != theirs.kind:
            common = _common_characters(literal, opposite)
            return Agreement(here + common, there + common, tuple(changed))
        if mine.text != theirs.text:
            changed.append((mine, theirs))
        here, there = mine.stop, theirs.stop
    return Agreement(here, there, tuple(changed))


def _places(pattern: re.Pattern[str], text: str) -> Iterator[tuple[int, int]]:
    for match in pattern.finditer(text):
        yield match.span("other" if match.groupdict().get("other") else "field")


def _common_characters(left: str, right: str) -> int:
    """How many at the start are equal."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(left), len(right)))


def _end(text: str) -> Field:
    return Field("end", len(text), len(text), "")
