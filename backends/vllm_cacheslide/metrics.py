"""Our numbers on vLLM's own `/metrics`, and in its periodic log line.

In: what the receipts of rank 0 and the stores of all ranks add up to since the last step. Out:
Prometheus counters under vLLM's labels, one engine each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from prometheus_client import REGISTRY
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

STORED = "stored_bytes"
"""The one family of levels and not of sums."""

_FAMILIES = {
    "requests": (("outcome",), "Annotated requests."),
    "fallbacks": (("reason",), "Requests answered densely after trouble inside reuse."),
    "tokens": (("kind",), "Prompt tokens of annotated requests."),
    "seconds": (("phase",), "Time spent on annotated requests; loading overlaps with computing."),
    "store_bytes": (("tier", "direction"), "Keys and values moved, all ranks together."),
    "misses": (("reason",), "Stored contexts that were asked for and are not there."),
    "store_failures": (("kind",), "Page files that could not be written."),
}
"""Labels and help. A number `family:value...` counts in `cacheslide_family` under those labels."""

_OURS: list[Any] = []
"""The collectors of this process's newest server: they give way to those of the next one, as vLLM's
own do, since names are taken only once."""


class Stats(KVConnectorStats):
    """`data`: numbers by name, as `Receipts` and `StoreNews` count them; see `_FAMILIES`."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> Stats:
        levels = {
            name: value
            for data in (self.data, other.data)
            for name, value in data.items()
            if name.startswith(STORED)
        }
        return Stats({**(Counter(self.data) + Counter(other.data)), **levels})

    def reduce(self) -> dict[str, int | float]:
        """For the log."""
        return {name: round(value, 3) for name, value in sorted(self.data.items())}

    def is_empty(self) -> bool:
        return not self.data


class PrometheusMetrics(KVConnectorPromMetrics):
    """The counters of all engines of this server; in one process the newest server's."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        while _OURS:
            with suppress(KeyError):  # a kind of metric that is registered elsewhere
                REGISTRY.unregister(_OURS.pop())
        self._counters = {
            name: self._counter_cls(
                name=f"cacheslide_{name}", documentation=help, labelnames=[*labelnames, *labels]
            )
            for name, (labels, help) in _FAMILIES.items()
        }
        self._stored = self._gauge_cls(
            name=f"cacheslide_{STORED}",
            documentation="Keys and values in the page store of one rank.",
            labelnames=[*labelnames, "tier"],
            multiprocess_mode="mostrecent",
        )
        _OURS.extend((*self._counters.values(), self._stored))

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        engine = self.per_engine_labelvalues[engine_idx]
        for key, value in transfer_stats_data.items():
            family, *labels = key.split(":")
            if family == STORED:
                self._stored.labels(*engine, *labels).set(value)
            else:
                self._counters[family].labels(*engine, *labels).inc(value)
