"""Our numbers on vLLM's own `/metrics`, and in its periodic log line.

In: what the receipts of rank 0 add up to since the last step. Out: Prometheus counters under vLLM's
labels, one engine each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from prometheus_client import REGISTRY
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

STORED = "stored_bytes"
"""The one number that is a level and not a sum."""

_FAMILIES = {
    "cacheslide_requests": ("outcome", "Annotated requests."),
    "cacheslide_tokens": ("kind", "Prompt tokens of annotated requests."),
    "cacheslide_seconds": ("phase", "Time spent on annotated requests."),
}
"""Name: label and help. A number `family:value` counts in `cacheslide_family` under that label."""


class Stats(KVConnectorStats):
    """`data`: numbers by name, as `Receipts` counts them; see `_FAMILIES`."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> Stats:
        level = other.data.get(STORED, self.data.get(STORED))
        summed = {**(Counter(self.data) + Counter(other.data))}
        return Stats(summed if level is None else {**summed, STORED: level})

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
        _unregister()
        self._counters = {
            name: self._counter_cls(name=name, documentation=help, labelnames=[*labelnames, label])
            for name, (label, help) in _FAMILIES.items()
        }
        self._stored = self._gauge_cls(
            name=f"cacheslide_{STORED}",
            documentation="Keys and values in the page store of rank 0.",
            labelnames=labelnames,
            multiprocess_mode="mostrecent",
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        engine = self.per_engine_labelvalues[engine_idx]
        for key, value in transfer_stats_data.items():
            if key == STORED:
                self._stored.labels(*engine).set(value)
                continue
            family, _, label = key.partition(":")
            self._counters[f"cacheslide_{family}"].labels(*engine, label).inc(value)


def _unregister() -> None:
    """An earlier server's counters give way, as vLLM's own do: names are taken only once."""
    ours = {*_FAMILIES, f"cacheslide_{STORED}"}
    for collector in list(REGISTRY._collector_to_names):
        if getattr(collector, "_name", None) in ours:
            REGISTRY.unregister(collector)
