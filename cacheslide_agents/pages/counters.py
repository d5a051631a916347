"""What a store tells of itself.

In: its holdings. Out: a flat mapping of numbers; names that end in `_bytes` are bytes, in `_s`
seconds. All but the sizes of now count from the opening of the store.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from cacheslide_agents.pages.block import State
from cacheslide_agents.pages.holdings import Holdings
from cacheslide_agents.pages.limits import Limits

MISSES = ("unknown", "evictions", "superseded", "expired", "cleared", "torn", "no_layer")
"""Why a context that was asked for is not there."""
COUNTED = (
    "hits", "puts", "evictions", "superseded", "expired", "torn", "refused", "stalls",
    "spilled_blocks", "packed_blocks", "dropped_blocks", "promoted_blocks", "write_failures",
    "dirtied_bytes", "memory_read_bytes", "memory_write_bytes", "ssd_read_bytes",
)  # fmt: skip


def kernel_write_bytes() -> int | None:
    """What the kernel says this process sent to storage; `None` where it does not say."""
    try:
        lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    told = dict(line.split(": ") for line in lines if ": " in line)
    return int(told["write_bytes"]) if "write_bytes" in told else None


class Counters:
    def __init__(self, holdings: Holdings, limits: Limits) -> None:
        self._holdings, self._limits = holdings, limits
        self._kernel_start = kernel_write_bytes()

    def counts(self) -> dict[str, float]:
        """Counters, and how much lies in each tier: no block or extent is looked at."""
        counts, disk = self._holdings.counts, self._holdings.disk
        totals = {name: float(counts[name]) for name in COUNTED}
        misses = {f"misses_{reason}": float(counts[f"misses_{reason}"]) for reason in MISSES}
        totals |= misses | {"misses": sum(misses.values())}
        totals["stall_s"] = self._holdings.seconds["stall"]
        totals["memory_bytes"] = float(self._holdings.host.used_bytes)
        if disk is not None:
            totals["ssd_bytes"] = float(disk.nbytes)
            totals["ssd_write_bytes"] = float(disk.written_bytes)
        return totals

    def metrics(self) -> Mapping[str, float]:
        counts = self.counts()
        return counts | self._sizes() | self._written(counts["dirtied_bytes"])

    def _sizes(self) -> dict[str, float]:
        host, entries = self._holdings.host, self._holdings.catalog.entries()
        sizes = {
            "contexts": float(len(entries)),
            "pages": float(sum(block.geometry.layers for block in host.blocks)),
            "memory_budget_bytes": float(host.budget_bytes),
        }
        for state in State:
            held = sum(b.geometry.block_bytes for b in host.blocks if b.state is state)
            sizes[f"memory_{state.value}_bytes"] = float(held)
        return sizes

    def _written(self, dirtied: float) -> dict[str, float]:
        """`write_amplification`: bytes written to files for a byte of new or corrected K/V."""
        disk = self._holdings.disk
        if disk is None:
            return {}
        told = {
            "ssd_dead_bytes": float(disk.dead_bytes),
            "ssd_budget_bytes": float(self._limits.disk_bytes),
            "damaged_rows": float(disk.damaged),
            "missing_extents": float(disk.missing),
            "spared_extents": float(len(disk.spared)),
            "write_amplification": disk.written_bytes / dirtied if dirtied else 0.0,
        }
        now = kernel_write_bytes()
        if now is not None and self._kernel_start is not None:
            told["kernel_write_bytes"] = float(now - self._kernel_start)
        return told
