"""The server's mark on the annotations it has made itself.

A client can write anything into `kv_transfer_params`, a forged annotation, too, and vLLM has more
routes that pass them on than ours. So the server's processes share a secret, and where there is one
the scheduler's side believes nothing without it.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from typing import Any

from cacheslide_agents.errors import RequestError
from vllm_cacheslide.wire import PARAMETER, Annotation

VARIABLE = "CACHESLIDE_STAMP"
"""In the environment: child processes inherit it, and vLLM logs arguments only."""


def make_stamp() -> None:
    """Call it before vLLM's processes start."""
    os.environ[VARIABLE] = secrets.token_hex(16)


def stamp_of_server() -> str:
    """Empty in an engine that no server has started."""
    return os.environ.get(VARIABLE, "")


def stamped(annotation: Annotation, stamp: str) -> dict[str, Any]:
    """The value of `kv_transfer_params`."""
    return {PARAMETER: {**annotation.to_params()[PARAMETER], "stamp": stamp}}


def expect_stamp(params: Mapping[str, Any], stamp: str) -> None:
    """`RequestError` unless our part of `params` bears `stamp`; an empty one asks for nothing."""
    if not stamp:
        return
    body = params.get(PARAMETER)
    given = body.get("stamp") if isinstance(body, Mapping) else None
    same = isinstance(given, str) and secrets.compare_digest(
        given.encode("utf-8", "replace"), stamp.encode()
    )
    if not same:
        raise RequestError("it did not come through a route that takes chunk plans")
