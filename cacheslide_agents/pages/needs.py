"""Who still needs which place on SSD.

In: places that somebody begins to need, or needs no more. Out: what is needed, place by place.
"""

from __future__ import annotations

from collections import Counter

from cacheslide_agents.pages.block import Place


class Needs:
    """Counts those who need a place: blocks in the store's hands and committed contexts."""

    def __init__(self) -> None:
        self._of: Counter[Place] = Counter()
        self._live: Counter[int] = Counter()

    def hold(self, place: Place) -> None:
        if self._of[place] == 0:
            self._live[place.extent] += 1
        self._of[place] += 1

    def release(self, place: Place) -> None:
        self._of[place] -= 1
        if self._of[place] == 0:
            del self._of[place]
            self._live[place.extent] -= 1

    def times(self, place: Place) -> int:
        """How many need `place`."""
        return self._of[place]

    def count(self, extent: int) -> int:
        """How many places of `extent` are needed."""
        return self._live[extent]

    def within(self, extent: int) -> list[Place]:
        """Which ones, in order."""
        return sorted(place for place in self._of if place.extent == extent)
