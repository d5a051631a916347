"""Chunk ids nobody chose: a base name, numbered from its second use."""

from __future__ import annotations

from collections.abc import Iterable


class UniqueIds:
    """Hands out ids that differ from each other and from those `taken` before."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self._taken = set(taken)
        self._uses: dict[str, int] = {}

    def new(self, base: str) -> str:
        """`base`, or `base-2`, `base-3` ... when it is taken."""
        count = self._uses.get(base, 0) + 1
        while (name := base if count == 1 else f"{base}-{count}") in self._taken:
            count += 1
        self._uses[base] = count
        self._taken.add(name)
        return name
