"""Receipts of the last requests, where the engine's workers can be asked for them.

In: plans and what became of them. Out: receipts by the client's request id, and totals.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping

from cacheslide_agents.backend import Receipt


class Receipts:
    """Remembers the newest `most`."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._latest: OrderedDict[str, Receipt] = OrderedDict()
        self._totals: Counter[str] = Counter()

    def add(self, receipt: Receipt) -> None:
        """A request id that comes again gets the new receipt."""
        self._totals.update(
            {
                "requests": 1,
                f"outcome_{receipt.outcome}": 1,
                "prompt_tokens": receipt.prompt_tokens,
                "reused_tokens": receipt.reused_tokens,
                "active_tokens": receipt.active_tokens,
                "load_s": receipt.load_s,
                "compute_s": receipt.compute_s,
            }
        )
        self._latest.pop(receipt.request_id, None)
        self._latest[receipt.request_id] = receipt
        if len(self._latest) > self._most:
            self._latest.popitem(last=False)

    def of(self, request_id: str) -> Receipt | None:
        return self._latest.get(request_id)

    def totals(self) -> Mapping[str, float]:
        return {name: float(value) for name, value in self._totals.items()}
