"""The vocabulary: chunks of a prompt, their token spans, and runs shared with a cached prompt.

In: text from templates or messages. Out: frozen values every floor above speaks of.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b
from typing import Any

from cacheslide_agents.errors import PromptError


class Role(StrEnum):
    """The author's hint on a chunk. What is reused is decided per request by alignment."""

    REUSE = "reuse"
    RECOMPUTE = "recompute"


def text_digest(text: str) -> str:
    """128-bit hex digest of `text`; lone surrogates are kept apart, never an error."""
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def not_unicode(text: str) -> str:
    """What is wrong with text that no encoding can carry, as the rest of a sentence; else empty."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found, place = text[error.start], error.start
        return f"is not Unicode text: lone surrogate {found!r} at character {place}; replace it"
    return ""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A contiguous piece of one message, with an id that is unique in the prompt."""

    id: str
    text: str
    role: Role = Role.RECOMPUTE

    @property
    def digest(self) -> str:
        return text_digest(self.text)


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message whose content is its chunks, in order.

    `extra` carries what a chat template may read besides: `tool_calls`, `tool_call_id`, `name`.
    """

    role: str
    chunks: tuple[Chunk, ...]
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def content(self) -> str:
        return "".join(chunk.text for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class ChunkedPrompt:
    """A conversation cut into chunks, with the task (kind of prompt) it belongs to."""

    messages: tuple[Message, ...]
    task: str = "default"

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for chunk in self.chunks():
            if chunk.id in seen:
                raise PromptError(
                    f"chunk id {chunk.id!r} appears twice in the prompt for task {self.task!r}; "
                    "give every chunk its own id"
                )
            seen.add(chunk.id)

    def chunks(self) -> Iterator[Chunk]:
        for message in self.messages:
            yield from message.chunks


@dataclass(frozen=True, slots=True)
class Span:
    """The tokens [start, stop) that a chunk became. Spans of a prompt partition its ids."""

    id: str
    role: Role
    start: int
    stop: int
    digest: str

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A rendered and tokenised prompt. `spans` partition `ids` in order.

    `ends[i]`: the character of `text` that token i ends before; empty where nobody kept count.
    """

    ids: tuple[int, ...]
    spans: tuple[Span, ...]
    text: str
    task: str = "default"
    ends: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens [start, start + length) of the prompt that equal cached tokens from `cached_start`."""

    start: int
    cached_start: int
    length: int

    @property
    def stop(self) -> int:
        return self.start + self.length

    @property
    def cached_stop(self) -> int:
        return self.cached_start + self.length

    @property
    def shift(self) -> int:
        return self.start - self.cached_start


@dataclass(frozen=True, slots=True)
class Edit:
    """New tokens [start, stop) that stand where cached tokens [cached_start, cached_stop) stood."""

    start: int
    stop: int
    cached_start: int
    cached_stop: int


@dataclass(frozen=True, slots=True)
class Alignment:
    """How a prompt of `length` tokens lines up with a cached one of `cached_length` tokens.

    `runs` are maximal, ordered and disjoint on both sides; what lies between them are the edits.
    """

    length: int
    cached_length: int
    runs: tuple[Run, ...]

    @property
    def matched(self) -> int:
        return sum(run.length for run in self.runs)

    @property
    def prefix(self) -> int:
        """Length of the common head."""
        first = self.runs[0] if self.runs else None
        return first.length if first and first.start == first.cached_start == 0 else 0

    def edits(self) -> tuple[Edit, ...]:
        edits: list[Edit] = []
        here = there = 0
        ends: Sequence[Run] = (*self.runs, Run(self.length, self.cached_length, 0))
        for run in ends:
            if run.start > here or run.cached_start > there:
                edits.append(Edit(here, run.start, there, run.cached_start))
            here, there = run.stop, run.cached_stop
        return tuple(edits)
