"""What a server reused, as far as it can say.

In: what the server told about one request. Out: a receipt, as plain JSON values, whatever server
it was. A server of ours puts `{"cacheslide": {"receipt": {...}}}` into `kv_transfer_params` of
an answer, or tells it afterwards under `/cacheslide/receipts/{id of the answer}`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, get_args

from cacheslide_agents.backend import Outcome, Receipt
from langchain_cacheslide.remote_answer import cached_tokens

NO_PLUGIN = "server without cacheslide: reuse is off"
NO_RECEIPT = "the server gave no receipt for this request"

_COUNTS = ("prompt_tokens", "reused_tokens", "active_tokens")


def receipt_in(answer: Mapping[str, Any]) -> dict[str, Any] | None:
    """The receipt that came with an answer."""
    params = answer.get("kv_transfer_params")
    ours = params.get("cacheslide") if isinstance(params, Mapping) else None
    return checked(ours.get("receipt") if isinstance(ours, Mapping) else None)


def checked(given: Any) -> dict[str, Any] | None:
    """`given` if it is a receipt; a server may send anything."""
    if not isinstance(given, Mapping) or given.get("outcome") not in get_args(Outcome):
        return None
    counts = [given.get(name) for name in _COUNTS]
    if not all(type(count) is int and count >= 0 for count in counts):
        return None
    known = {field.name for field in fields(Receipt)}
    return {name: value for name, value in given.items() if name in known}


def receipt_without(
    reason: str, answer: Mapping[str, Any], *, exact: bool, ttft_s: float = 0.0
) -> dict[str, Any]:
    """The receipt of a request of which only the server's usage is known.

    A server without cacheslide may still have its own, exact prefix cache; what that served counts
    as reused, and the reason says so. `ttft_s`: seconds to the first piece as seen from here.
    """
    usage = answer.get("usage") or {}
    prompt, cached = int(usage.get("prompt_tokens") or 0), cached_tokens(usage) or 0
    if cached:
        reason += f"; its own prefix cache served {cached} tokens"
    receipt = Receipt(
        request_id=str(answer.get("id") or ""),
        policy="server",
        outcome="declined",
        reason=reason,
        prompt_tokens=prompt,
        reused_tokens=cached,
        active_tokens=prompt - cached,
        compute_fraction=(prompt - cached) / prompt if prompt else 1.0,
        exact=exact,
        ttft_s=ttft_s,
    )
    return receipt.to_dict()
