"""Receipts of the last requests, where the engine's workers can be asked for them.

In: plans and what became of them. Out: receipts by the client's request id, and totals; one in
place of a receipt that no worker has.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np

from cacheslide_agents.backend import GenerationRequest, Receipt
from cacheslide_agents.policies.base import Policy
from cacheslide_agents.policies.planner import dense_plan
from cacheslide_agents.policies.receipts import build_receipt

MOST_CHUNKS = 64
"""Of a remembered receipt, on average. A plan may name 1,024 with long ids, a receipt of 400 KB."""


class Receipts:
    """Remembers the newest `most`, fewer when they have very many chunks."""

    def __init__(self, most: int) -> None:
        self._most, self._chunks = most, 0
        self._latest: OrderedDict[str, Receipt] = OrderedDict()
        self._totals: Counter[str] = Counter()
        self._news: Counter[str] = Counter()

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
                "wait_s": receipt.wait_s,
                "compute_s": receipt.compute_s,
            }
        )
        if receipt.outcome == "fallback":
            self._totals[f"fallback_{_kind(receipt.reason)}"] += 1
        self._news.update(_counted(receipt))
        self._forget(self._latest.pop(receipt.request_id, None))
        self._latest[receipt.request_id] = receipt
        self._chunks += len(receipt.chunks)
        while len(self._latest) > self._most or (
            len(self._latest) > 1 and self._chunks > self._most * MOST_CHUNKS
        ):
            self._forget(self._latest.popitem(last=False)[1])

    def _forget(self, receipt: Receipt | None) -> None:
        self._chunks -= len(receipt.chunks) if receipt is not None else 0

    def of(self, request_id: str) -> Receipt | None:
        return self._latest.get(request_id)

    def take_news(self) -> dict[str, float]:
        """What was added since the last call, as `metrics.Stats` names it."""
        news, self._news = self._news, Counter()
        return {name: float(value) for name, value in news.items()}

    def totals(self) -> Mapping[str, float]:
        return {name: float(value) for name, value in self._totals.items()}


def dense_receipt(request: GenerationRequest, policy: Policy, reason: str, layers: int) -> Receipt:
    """Of a request that vLLM computed whole, whatever was asked for."""
    ids = np.asarray(request.prompt_ids, dtype=np.int64)
    return build_receipt(
        dense_plan(ids, request.spans, policy, outcome="fallback", reason=reason),
        request_id=request.request_id,
        active=np.arange(len(ids)),
        rows_per_layer=[len(ids)] * layers,
    )


def _counted(receipt: Receipt) -> dict[str, Any]:
    counted = {
        f"requests:{receipt.outcome}": 1,
        "tokens:prompt": receipt.prompt_tokens,
        "tokens:reused": receipt.reused_tokens,
        "tokens:active": receipt.active_tokens,
        "seconds:plan": receipt.plan_s,
        "seconds:load": receipt.load_s,
        "seconds:wait": receipt.wait_s,
        "seconds:compute": receipt.compute_s,
    }
    if receipt.outcome == "fallback":
        counted[f"fallbacks:{_kind(receipt.reason)}"] = 1
    return counted


def _kind(reason: str) -> str:
    """The name of the error that a reason begins with: what a client writes names no counter."""
    name = reason.partition(":")[0]
    return name if name.isidentifier() else "other"
