"""One message's content with the borders of its chunks, and those borders found again.

In: a message. Out: its content with sentinels at the borders; then, given where the sentinels came
out of a chat template, where the chunks end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise

from cacheslide_agents.chunks import Message, Role, text_digest
from cacheslide_agents.prompt.shield import Shield


@dataclass(frozen=True, slots=True)
class Label:
    """What is said of a chunk (or of several, where the borders between them were lost)."""

    id: str
    role: Role
    digest: str


@dataclass(frozen=True, slots=True)
class Bordered:
    """`borders` in characters, from 0 to the length of `content`; a label for each gap."""

    content: str
    borders: tuple[int, ...]
    labels: tuple[Label, ...]

    @classmethod
    def of(cls, message: Message, shield: Shield) -> Bordered:
        content = shield.content(message.role, message.content)
        ends = accumulate((len(chunk.text) for chunk in message.chunks), initial=0)
        labels = tuple(Label(chunk.id, chunk.role, chunk.digest) for chunk in message.chunks)
        return cls(content.text, tuple(map(content.move, ends)), labels)

    def merged(self) -> Bordered:
        """The message as one chunk; reusable if every one of its chunks is."""
        if len(self.labels) < 2:
            return self
        reuse = all(label.role is Role.REUSE for label in self.labels)
        label = Label(
            f"{self.labels[0].id}..{self.labels[-1].id}",
            Role.REUSE if reuse else Role.RECOMPUTE,
            text_digest(" ".join(label.digest for label in self.labels)),
        )
        return Bordered(self.content, (0, len(self.content)), (label,))

    def marked(self, sentinel: Callable[[int], str]) -> str:
        """The content with its borders marked, but none in white space that may be trimmed away.

        Blank content is left alone: templates ask whether there is any.
        """
        if not self.content.strip():
            return self.content
        parts, last = [], 0
        for index, border in enumerate(self.borders):
            here = min(max(border, self._lead), self._trail)
            parts += [self.content[last:here], sentinel(index)]
            last = here
        return "".join((*parts, self.content[last:]))

    def ends(self, found: Mapping[int, int], text: str) -> list[int | None] | None:
        """The end in `text` of each labelled chunk, given where the sentinels stood.

        `None` for a chunk of which nothing came out. A template may drop the beginning of a
        message (its thinking); if anything else is missing or out of order, there is no result.
        """
        if not found:
            return [None] * len(self.labels)
        places = [self._outwards(index, found[index], text) for index in sorted(found)]
        dropped = len(self.borders) - len(found)
        if places != sorted(places) or min(found) != dropped:
            return None
        gone: list[int | None] = [None] * (dropped - 1)
        cut_short = places[:1] if dropped else []
        return [*gone, *cut_short, *(q if q > p else None for p, q in pairwise(places))]

    def _outwards(self, index: int, place: int, text: str) -> int:
        """Move a place back out into the white space it was kept from, if that is still there."""
        border = self.borders[index]
        before, after = self.content[: self._lead], self.content[self._trail :]
        if border < self._lead and text.endswith(before, 0, place):
            return place - (self._lead - border)
        if border > self._trail and text.startswith(after, place):
            return place + (border - self._trail)
        return place

    @property
    def _lead(self) -> int:
        """Where leading white space ends."""
        return len(self.content) - len(self.content.lstrip())

    @property
    def _trail(self) -> int:
        """Where trailing white space begins."""
        return len(self.content.rstrip())
