"""Well-formed UTF-8 across the borders of tokens, which the grammar engine checks only in part.

In: the bytes that each token writes. Out: tokens that no text contains, and those that cannot
follow a token which ends inside a character. Ranges: Unicode 16, table 3-7.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Flags = npt.NDArray[np.bool_]

_ILL_FORMED = re.compile(
    rb"[\xc0\xc1\xf5-\xff]|\xe0[\x80-\x9f]|\xed[\xa0-\xbf]|\xf0[\x80-\x8f]|\xf4[\x90-\xbf]"
)
_WRONG_SECOND = {
    0xE0: range(0x80, 0xA0),  # overlong
    0xED: range(0xA0, 0xC0),  # surrogates
    0xF0: range(0x80, 0x90),  # overlong
    0xF4: range(0x90, 0xC0),  # beyond U+10FFFF
}


def well_formed(piece: bytes) -> bool:
    """Whether some text may contain `piece`; it may begin and end inside a character."""
    return _ILL_FORMED.search(piece) is None


class Utf8Guard:
    """`pieces` [vocabulary]: what each token writes."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._leads = {
            token: piece[-1]
            for token, piece in enumerate(pieces)
            if piece and piece[-1] in _WRONG_SECOND
        }
        first = np.array([piece[0] if piece else 0 for piece in pieces], dtype=np.uint8)
        self._wrong = {lead: np.isin(first, list(wrong)) for lead, wrong in _WRONG_SECOND.items()}

    def wrong_after(self, token: int) -> Flags | None:
        """[vocabulary]: tokens that cannot follow `token`; `None` where it does not matter."""
        lead = self._leads.get(token)
        return None if lead is None else self._wrong[lead]
