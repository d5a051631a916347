"""How many candidates a fraction buys.

In: a fraction of the candidates. Out: a whole number of them.
"""

from __future__ import annotations

import math

from cacheslide_agents.errors import RequestError


def check_fraction(owner: object, fraction: float) -> None:
    """`RequestError` unless 0 <= fraction <= 1."""
    if not 0.0 <= fraction <= 1.0:
        raise RequestError(
            f"{type(owner).__name__}(fraction={fraction!r}) must be a share of the reused tokens, "
            "between 0 and 1"
        )


def share(fraction: float, candidates: int) -> int:
    """ceil(fraction * candidates), not led astray by the rounding of the product (0.07 * 100)."""
    return math.ceil(fraction * candidates - 1e-9)
