"""The connector's own options, from `kv_connector_extra_config`.

In: what the engine was started with. Out: checked values.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, Self, get_args

from cacheslide_agents.errors import RequestError
from cacheslide_agents.policies import named

GIB = 1 << 30
_HEADER = re.compile(r"[A-Za-z0-9-]*")
AttentionKind = Literal["runs", "masked"]


@dataclass(frozen=True)
class Settings:
    """`store_bytes` bounds each worker's page store; `receipts` how many are remembered.

    `attention` is how active rows attend: `runs` (the engine's own kernels) or `masked` (PyTorch's
    SDPA over gathered keys; for checks). Only a server reads `policy`, for requests that name none,
    and `tenant_header`, which tells tenants apart besides their API keys.
    """

    store_bytes: int = 4 * GIB
    attention: AttentionKind = "runs"
    receipts: int = 4096
    policy: str = "cacheslide"
    tenant_header: str = ""

    @classmethod
    def of(cls, extra: Mapping[str, Any]) -> Self:
        """`RequestError` for an option that does not exist or has a value it cannot have."""
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(extra) - known)
        if unknown:
            raise RequestError(
                f"kv_connector_extra_config has {', '.join(unknown)}; known: "
                + ", ".join(sorted(known))
            )
        made = cls(**extra)
        for name in ("store_bytes", "receipts"):
            value = getattr(made, name)
            if type(value) is not int or value < 1:
                raise RequestError(f"{name}={value!r} must be at least 1, and whole")
        if made.attention not in get_args(AttentionKind):
            raise RequestError(f"attention={made.attention!r} must be 'runs' or 'masked'")
        named(made.policy)
        if not _HEADER.fullmatch(made.tenant_header):
            raise RequestError(f"tenant_header={made.tenant_header!r} is no name of a header")
        return made
