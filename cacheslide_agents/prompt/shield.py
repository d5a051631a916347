"""Keeps control-token text in values apart from the control tokens a chat template writes.

In: the strings of a conversation. Out: the same strings with placeholders where they hold
control-token text, and later the rendered text with that text put back, places known.
"""

from __future__ import annotations

import re
import secrets
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cacheslide_agents.prompt.control import ControlTokens

MODEL_WRITTEN = ("content", "reasoning_content")
"""Fields of an assistant message that hold what the model itself wrote, markup included."""


@dataclass(frozen=True)
class Replaced:
    """A text after replacements, and where its old characters now stand."""

    text: str
    _starts: Sequence[int] = ()
    _moves: Sequence[tuple[int, int, int]] = ()
    """Per replacement: old start, old stop, and how far the text after it moved."""

    @classmethod
    def of(
        cls, text: str, pattern: re.Pattern[str], new: Callable[[re.Match[str]], str]
    ) -> Replaced:
        matches = list(pattern.finditer(text))
        if not matches:
            return cls(text)
        parts, last, moves, shift = [], 0, [], 0
        for match in matches:
            part = new(match)
            parts += [text[last : match.start()], part]
            last = match.end()
            shift += len(part) - len(match.group())
            moves.append((match.start(), match.end(), shift))
        return cls("".join((*parts, text[last:])), [start for start, _, _ in moves], moves)

    def move(self, offset: int) -> int:
        """Where an offset of the old text is now; inside a replacement, where that starts."""
        index = bisect_right(self._starts, offset) - 1
        if index < 0:
            return offset
        start, stop, shift = self._moves[index]
        if offset >= stop:
            return offset + shift
        return start + (self._moves[index - 1][2] if index else 0)


@dataclass
class Shield:
    """The control-token text of one conversation's values, by placeholder."""

    controls: ControlTokens
    _nonce: str = field(default_factory=lambda: secrets.token_hex(8))
    _taken: list[str] = field(default_factory=list)

    def content(self, role: str, text: str) -> Replaced:
        """Role tokens are withheld everywhere, other structure but from what the model wrote."""
        return Replaced.of(text, self._pattern(role, "content"), self._take)

    def extra(self, role: str, extra: Mapping[str, Any]) -> dict[str, Any]:
        return {key: self.nested(value, self._pattern(role, key)) for key, value in extra.items()}

    def nested(self, value: Any, pattern: re.Pattern[str] | None = None) -> Any:
        """Strings and keys inside JSON-like data."""
        pattern = pattern or self.controls.pattern
        if isinstance(value, str):
            return pattern.sub(self._take, value)
        if isinstance(value, Mapping):
            return {
                self.nested(key, pattern): self.nested(item, pattern) for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.nested(item, pattern) for item in value]
        return value

    def lifted(self, text: str) -> Replaced:
        """A rendered text with every placeholder turned back."""
        if not self._taken:
            return Replaced(text)
        placeholder = re.compile(rf"zq{self._nonce}c(\d+)z")
        return Replaced.of(text, placeholder, lambda match: self._taken[int(match.group(1))])

    def _pattern(self, role: str, key: str) -> re.Pattern[str]:
        if role == "assistant" and key in MODEL_WRITTEN:
            return self.controls.roles_pattern
        return self.controls.pattern

    def _take(self, match: re.Match[str]) -> str:
        self._taken.append(match.group())
        return f"zq{self._nonce}c{len(self._taken) - 1}z"
