"""How much a store may hold.

In: numbers. Out: the same, once they make sense.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import isfinite

from cacheslide_agents.errors import RequestError

GIB = 1 << 30


@dataclass(frozen=True)
class Limits:
    """Bytes and counts of one store; `None` is no limit.

    `budget_bytes` of host memory, `disk_bytes` of extents on SSD. Of one text at most
    `copies_per_content` contexts are kept and of one named session at most `copies_per_session`.
    A context not used for `ttl_s` seconds goes; the contexts of one namespace together are no
    larger than `namespace_quota_bytes`, those of one tenant (`ContextKey.tenant`) no larger than
    `tenant_quota_bytes`: in whole blocks, as if they shared none.
    """

    budget_bytes: int
    disk_bytes: int = 64 * GIB
    copies_per_content: int = 2
    copies_per_session: int = 1
    ttl_s: float | None = None
    namespace_quota_bytes: int | None = None
    tenant_quota_bytes: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "ttl_s":
                if value is not None and not _is_seconds(value):
                    raise RequestError(
                        f"page store(ttl_s={value!r}) must be a positive number of seconds, or None"
                    )
            elif field.name.endswith("_quota_bytes") and value is None:
                continue
            elif not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise RequestError(
                    f"page store({field.name}={value!r}) must be at least 1, and whole"
                )


def _is_seconds(value: object) -> bool:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    return isfinite(value) and value > 0
