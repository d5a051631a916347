"""Which slot of the working memory holds which row of one request, layer by layer.

In: a prompt's length, the rows whose cached keys and values are recomputed. Out: slots of rows and
rows of slots. Softmax does not depend on the order of keys, so attention may run over slots as they
lie, under the mask `owners <= row`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Positions = npt.NDArray[np.int64]


class SlotMap:
    """Slots of `rows` rows, of which the first `prompt` are the prompt and the rest is decoded.

    Slots [0, spare) are fresh; row r is at home in slot `spare + r`, where a load puts it. In a
    layer that moved, the rows `corrected` (ascending) lie in fresh slots, next to the homes in
    reverse order, so that what a row sees is one range of slots. Their homes are vacated; decoded
    rows take those first, in order, and thereafter the first homes behind the prompt.
    """

    def __init__(self, corrected: Positions, *, prompt: int, rows: int, spare: int) -> None:
        count = len(corrected)
        assert count <= spare, "fewer fresh slots than corrected rows"
        self.spare = spare
        self._moved: set[int] = set()
        self._slots = np.arange(spare, spare + rows, dtype=np.int64)
        self._slots[corrected] = np.arange(spare - 1, spare - 1 - count, -1)
        decoded = self._slots[prompt:]
        homes = np.concatenate([corrected + spare, decoded])
        decoded[:] = homes[: len(decoded)]
        self._owners = np.full(spare + rows, rows, dtype=np.int64)
        self._owners[self._slots] = np.arange(rows)
        self._stops = np.maximum.accumulate(self._slots) + 1
        self._starts = np.minimum.accumulate(self._slots)

    @property
    def moved_layers(self) -> Sequence[int]:
        return sorted(self._moved)

    def move(self, layer: int) -> None:
        """The corrected rows of `layer` are written to fresh slots; their load may come later."""
        self._moved.add(layer)

    def moved(self, layer: int) -> bool:
        return layer in self._moved

    def slots(self, rows: Positions) -> Positions:
        """Slots of `rows` in a layer that moved."""
        return self._slots[rows]

    def seen(self, row: int) -> tuple[int, int]:
        """First and one past the last slot that a query of `row` looks at in a moved layer."""
        return int(self._starts[row]), int(self._stops[row])

    def owners(self, start: int, stop: int) -> Positions:
        """Rows of slots [start, stop) in a moved layer; larger than any row where there is none.

        A vacated slot belongs to the decoded row that will take it, which no earlier row sees.
        """
        return self._owners[start:stop]
