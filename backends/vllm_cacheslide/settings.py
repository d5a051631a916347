"""The connector's own options, from `kv_connector_extra_config`.

In: what the engine was started with. Out: checked values.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, Self, get_args

from cacheslide_agents.errors import RequestError
from cacheslide_agents.pages.eviction import eviction_named
from cacheslide_agents.pages.limits import GIB, Limits
from cacheslide_agents.policies import named

_HEADER = re.compile(r"[A-Za-z0-9-]*")
AttentionKind = Literal["runs", "masked", "fused"]


@dataclass(frozen=True)
class Settings:
    """`store_bytes` bounds the memory of each worker's page store; `receipts` how many are
    remembered.

    With `store_path`, a folder for this engine alone, contexts outlive the engine: every worker
    keeps up to `disk_bytes` of them in a folder of its own there. `eviction` (by name), `ttl_s` and
    the two quotas are those of `SlideStore`. `prefetch` layers are loaded ahead of
    computation (0: none, `None`: where pages must be read from SSD or copied to a device).

    `attention` is how active rows attend: `runs` (the engine's own kernels), `fused` (ours for
    scattered rows, on CUDA where it has proved right, elsewhere as `runs`) or `masked` (PyTorch's
    SDPA over gathered keys; for checks); CoPE models have their own and take `runs` only.

    `profiles` are files of `cacheslide calibrate`, or folders of them, for a CoPE model. Only a
    server reads `policy`, for requests that name none, and `tenant_header`, which tells tenants
    apart besides their API keys.
    """

    store_bytes: int = 4 * GIB
    store_path: str | None = None
    disk_bytes: int = 64 * GIB
    eviction: str = "slide"
    ttl_s: float | None = None
    namespace_quota_bytes: int | None = None
    tenant_quota_bytes: int | None = None
    prefetch: int | None = None
    attention: AttentionKind = "runs"
    profiles: Sequence[str] = ()
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
        made.check_store()
        if isinstance(made.profiles, str) or not all(isinstance(p, str) for p in made.profiles):
            raise RequestError(f"profiles={made.profiles!r} must be a list of files or folders")
        kinds = get_args(AttentionKind)
        if made.attention not in kinds:
            raise RequestError(f"attention={made.attention!r} must be one of {kinds}")
        named(made.policy)
        if not _HEADER.fullmatch(made.tenant_header):
            raise RequestError(f"tenant_header={made.tenant_header!r} is no name of a header")
        return made

    @property
    def one_per_session(self) -> bool:
        """With an SSD tier a session's next context corrects the blocks of its last in place."""
        return self.store_path is not None

    def check_store(self) -> None:
        """`RequestError` for bounds of the page store that make no sense."""
        if self.store_path is not None and not isinstance(self.store_path, str):
            raise RequestError(f"store_path={self.store_path!r} must be the name of a folder")
        Limits(
            self.store_bytes,
            self.disk_bytes,
            ttl_s=self.ttl_s,
            namespace_quota_bytes=self.namespace_quota_bytes,
            tenant_quota_bytes=self.tenant_quota_bytes,
        )
        eviction_named(self.eviction)
        if self.prefetch is not None and (type(self.prefetch) is not int or self.prefetch < 0):
            raise RequestError(f"prefetch={self.prefetch!r} must be at least 0 layers, or None")
