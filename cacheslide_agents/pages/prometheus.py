"""What a store or backend tells of itself, as Prometheus text.

In: a function that gives a flat mapping of numbers, `metrics` of a store or backend. Out: the text
of a scrape. Needs `prometheus_client`; registers nothing globally.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from cacheslide_agents.errors import BackendError, install_hint

if TYPE_CHECKING:
    from prometheus_client.core import Metric

PREFIX = "cacheslide_"
GAUGES = frozenset(
    {
        "contexts",
        "pages",
        "write_amplification",
        "memory_bytes",
        "memory_budget_bytes",
        "memory_clean_bytes",
        "memory_dirty_bytes",
        "memory_unsaved_bytes",
        "ssd_bytes",
        "ssd_dead_bytes",
        "ssd_budget_bytes",
        "spared_extents",
        "idle_waiting",
        "guard_kl",
        "guard_on_dense",
    }
)
"""What can fall, of a store or of a backend; everything else counts up."""

Metrics = Callable[[], Mapping[str, float]]


class Exporter:
    """One registry of its own over `metrics`, read anew at every scrape."""

    def __init__(self, metrics: Metrics) -> None:
        self._client = _client()
        self._metrics = metrics
        self.registry = self._client.CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Called by the registry. Misses are one family, labelled by reason."""
        core = self._client.core
        misses = core.CounterMetricFamily(
            f"{PREFIX}misses", "Contexts asked for in vain.", labels=["reason"]
        )
        for name, value in self._metrics().items():
            reason = name.removeprefix("misses_")
            if reason != name:
                misses.add_metric([reason], value)
            elif name != "misses":
                yield _family(core, name, value)
        yield misses

    def text(self) -> str:
        """What a scraper gets, in the text format."""
        return str(self._client.generate_latest(self.registry).decode("utf-8"))


def _family(core: Any, name: str, value: float) -> Metric:
    """Base units in the names: `_bytes`, `_seconds`."""
    stem = PREFIX + (name.removesuffix("_s") + "_seconds" if name.endswith("_s") else name)
    told = name.replace("_", " ")
    kind = core.GaugeMetricFamily if name in GAUGES else core.CounterMetricFamily
    family: Metric = kind(stem, f"{told[0].upper()}{told[1:]}.", value=value)
    return family


def _client() -> Any:
    try:
        import prometheus_client
        import prometheus_client.core
    except ImportError as error:
        raise BackendError(
            f"Prometheus metrics need a package that is not installed; {install_hint('metrics')}"
        ) from error
    return prometheus_client
