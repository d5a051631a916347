"""Things that are made once, however many threads ask for them.

In: keys, and how their things are made. Out: one thing for each key.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclass
class Spot(Generic[T]):
    """`thing` is `None` until it is made, and again once it is let go. Its lock is its maker's."""

    key: Any
    thing: T | None = None
    lock: Lock = field(default_factory=Lock)


class Shelf(Generic[T]):
    """One thing for each key; keys need `==` only.

    Who asks first makes it, and who asks for the same one waits. Nobody waits for another's. Where
    making fails, the next one tries again.
    """

    def __init__(self) -> None:
        self._spots: list[Spot[T]] = []
        self._lock = Lock()

    def get(self, key: Any, make: Callable[[], T]) -> T:
        """The thing of `key`. Raises what `make` raises."""
        spot = self._spot(key)
        with spot.lock:
            if spot.thing is None:
                spot.thing = make()
            return spot.thing

    def clear(self, close: Callable[[T], object] = lambda thing: None) -> None:
        """Let everything go, and `close` it. Who asks meanwhile gets a new one, made afterwards."""
        with self._lock:
            spots = tuple(self._spots)
        for spot in spots:
            with spot.lock:
                thing, spot.thing = spot.thing, None
                if thing is not None:
                    close(thing)

    def _spot(self, key: Any) -> Spot[T]:
        with self._lock:
            for spot in self._spots:
                if spot.key == key:
                    return spot
            self._spots.append(Spot(key))
            return self._spots[-1]
