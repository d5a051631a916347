"""ASGI middleware: a client's chunk plan goes in, the server's own annotation comes out.

In: requests to the routes that take plans, already authenticated. Out: the same requests, with an
annotation made and stamped here, in the namespace of their tenant. Requests without a plan and all
other routes pass untouched.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders

from cacheslide_agents.chunks import text_digest
from vllm_cacheslide.binding import Binding
from vllm_cacheslide.guard import log
from vllm_cacheslide.stamp import stamped
from vllm_cacheslide.wire import PARAMETER

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

STATE = "cacheslide"
"""Where the app's state keeps its `Desk`."""

_ANSWERS = {"/v1/chat/completions": "chatcmpl", "/v1/completions": "cmpl"}
"""Routes that take plans, and how vLLM begins the ids of their answers."""

_REQUEST_ID = "x-request-id"
_LONGEST_ID = 256


@dataclass(frozen=True)
class Desk:
    """What the middleware and the routes know of their server. `header`: see `tenant_of`."""

    binding: Binding
    stamp: str
    header: str

    def tenant_of(self, headers: Mapping[str, str]) -> str:
        """A digest of the API key and of the configured header: no one can write another's."""
        key = headers.get("authorization", "").partition(" ")[2]
        told = headers.get(self.header, "") if self.header else ""
        return text_digest(json.dumps([key, told]))

    def receipt_id(self, tenant: str, answer_id: str) -> str:
        """What the engine's workers call the request."""
        return f"{tenant}/{answer_id}"

    def stamped(self, body: bytes, kind: str, headers: MutableHeaders) -> bytes:
        """`body` with an annotation; as it was, if it holds no plan. May add a request id."""
        request = _object(body)
        params = request.get("kv_transfer_params")
        if not isinstance(params, dict) or PARAMETER not in params:
            return body
        name = _name(headers.get(_REQUEST_ID) or request.get("request_id"))
        headers[_REQUEST_ID] = name
        tenant = self.tenant_of(headers)
        receipt_id = self.receipt_id(tenant, f"{kind}-{name}")
        annotation = self.binding.annotate(request, tenant, receipt_id)
        request["kv_transfer_params"] = {**params, **stamped(annotation, self.stamp)}
        return json.dumps(request).encode()


class Stamping:
    """The middleware. It needs the app's `Desk`; without one it does nothing."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind = _kind(scope)
        desk = getattr(scope["app"].state, STATE, None) if kind else None
        if kind is None or desk is None:
            await self.app(scope, receive, send)
            return
        body = await _body(receive)
        if body is None:
            return
        scope = {**scope, "headers": list(scope["headers"])}
        headers = MutableHeaders(scope=scope)
        try:
            body = await run_in_threadpool(desk.stamped, body, kind, headers)
        except Exception:  # trouble inside reuse never fails a request
            log.warning("a chunk plan was not read", exc_info=True)
        headers["content-length"] = str(len(body))
        await self.app(scope, _replayed(body, receive), send)


def _name(given: Any) -> str:
    """The client's own name for its request, if a header and a URL can hold it; else a new one."""
    fits = isinstance(given, str) and 0 < len(given) <= _LONGEST_ID
    return given if fits and given.isascii() and given.isprintable() else uuid4().hex


def _kind(scope: Scope) -> str | None:
    if scope["type"] != "http" or scope["method"] != "POST":
        return None
    path: str = scope["path"]
    return _ANSWERS.get(path.removeprefix(scope.get("root_path", "")))


def _object(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`, if it can hold a plan; what is wrong with it vLLM will say."""
    if PARAMETER.encode() not in body:
        return {}
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


async def _body(receive: Receive) -> bytes | None:
    """The whole body; `None` when the client has gone."""
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


def _replayed(body: bytes, receive: Receive) -> Receive:
    """`body` in one message, then what comes after it: that the client goes."""
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_message() -> Message:
        return waiting.pop() if waiting else await receive()

    return next_message
