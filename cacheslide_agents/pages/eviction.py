"""Which contexts leave memory first.

In: the contexts that may leave. Out: the same, first to go first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from cacheslide_agents.pages.resident import Resident


class Eviction(Protocol):
    def order(self, residents: Iterable[Resident]) -> Sequence[Resident]: ...


@dataclass(frozen=True)
class Lru:
    """The one least recently stored or loaded goes first."""

    def order(self, residents: Iterable[Resident]) -> Sequence[Resident]:
        return sorted(residents, key=lambda resident: resident.used)
