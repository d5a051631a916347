"""Prompt Cache: chunks computed alone, at the places a schema gives them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cacheslide_agents.chunks import Span
from cacheslide_agents.errors import RequestError
from cacheslide_agents.policies.base import Population, Reuse
from cacheslide_agents.policies.plain import Plain, check_min_run

Slots = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class PromptCache(Plain):
    """Modular attention reuse (Gim et al., MLSys 2024, "Prompt Cache").

    `slots` (a mapping or pairs, by chunk id) is the schema: how many positions an update chunk may
    take, its longest expected value. A shorter value leaves a gap, so what follows keeps its place;
    reused chunks are not corrected. A longer value grows its slot for that request, which stands
    for the further schema copy that Prompt Cache would hold; the chunk's reason is then `overflow`.
    Departs from the paper in that stored keys are position-free and get the schema's positions when
    loaded, which is the same computation, and in that parameters are not padded with unknown
    tokens.
    """

    slots: Mapping[str, int] | Slots = ()
    min_run: int = 16
    name: str = "prompt_cache"
    population: Population = Population.ISOLATED
    reuse: Reuse = Reuse.CHUNKS

    def __post_init__(self) -> None:
        check_min_run(self.name, self.min_run)
        pairs = self.slots.items() if isinstance(self.slots, Mapping) else self.slots
        object.__setattr__(self, "slots", tuple(sorted(pairs)))
        for chunk, tokens in self._slots.items():
            if tokens < 0:
                raise RequestError(
                    f"prompt_cache: the slot of chunk {chunk!r} has {tokens} tokens; "
                    "a slot has at least 0"
                )

    @property
    def _slots(self) -> dict[str, int]:
        return dict(self.slots)

    def positions(self, spans: tuple[Span, ...], length: int) -> npt.NDArray[np.int64]:
        """[length]: slots in a row, each value at the start of its slot."""
        slots = self._slots
        lengths = [len(span) for span in spans]
        widths = [max(len(span), slots.get(span.id, 0)) for span in spans]
        gaps = np.cumsum(np.array(widths, dtype=np.int64) - np.array(lengths, dtype=np.int64))
        shifts = np.repeat(np.concatenate(([0], gaps[:-1])), lengths) if spans else 0
        positions: npt.NDArray[np.int64] = np.arange(length, dtype=np.int64) + shifts
        return positions

    def reasons(self, spans: tuple[Span, ...]) -> Mapping[str, str]:
        slots = self._slots
        return {span.id: "overflow" for span in spans if len(span) > slots.get(span.id, len(span))}
