"""Stop strings found in text that arrives in pieces.

In: pieces of text. Out: the text that cannot belong to a stop string any more, and whether one was
completed. Where the pieces are cut makes no difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Self


class StopFinder:
    """Ends the text before the first stop string to be completed; of those, the longest.

    Each stop string is matched by the Knuth-Morris-Pratt automaton, so that a character costs a
    bounded number of steps, and the longest partial match is what must be held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._borders = tuple(_borders(stop) for stop in self._stops)
        self._matched = [0] * len(self._stops)
        self._held = ""

    def feed(self, text: str) -> tuple[str, bool]:
        """Text to show, and whether a stop string ended it (what follows it is dropped)."""
        if not self._stops:
            return text, False
        for place, letter in enumerate(text, start=1):
            if completed := self._step(letter):
                shown = (self._held + text[:place])[:-completed]
                self._held = ""
                return shown, True
        text = self._held + text
        certain = len(text) - max(self._matched)
        self._held = text[certain:]
        return text[:certain], False

    def flush(self) -> str:
        """What was held back, when no more text will come."""
        held, self._held = self._held, ""
        return held

    def fork(self) -> Self:
        """Another text that begins like this one."""
        twin = copy(self)
        twin._matched = self._matched.copy()
        return twin

    def _step(self, letter: str) -> int:
        """Advance every automaton; the length of the longest stop string completed, or 0."""
        completed = 0
        for index, stop in enumerate(self._stops):
            matched = self._matched[index]
            while matched and stop[matched] != letter:
                matched = self._borders[index][matched - 1]
            if stop[matched] == letter:
                matched += 1
            if matched == len(stop):
                completed = max(completed, matched)
            self._matched[index] = matched
        return completed


def _borders(stop: str) -> tuple[int, ...]:
    """For each prefix, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(stop)
    length = 0
    for place in range(1, len(stop)):
        while length and stop[place] != stop[length]:
            length = borders[length - 1]
        if stop[place] == stop[length]:
            length += 1
        borders[place] = length
    return tuple(borders)
