"""Waiting in tests for what another thread does."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic, sleep


def until(holds: Callable[[], bool], seconds: float = 60.0) -> bool:
    """Whether `holds()` became true in time."""
    deadline = monotonic() + seconds
    while not (now := holds()) and monotonic() < deadline:
        sleep(0.01)
    return now
