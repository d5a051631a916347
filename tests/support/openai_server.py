"""A real HTTP server on 127.0.0.1 that speaks OpenAI's chat completions, well or badly.

In: requests of any client. Out: the words of the last user message, or what a test has put into
the fields; every request is kept. It trusts no chunk plan: `plans` holds what it could validate.
"""

from __future__ import annotations

import json
import select
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from cacheslide_agents.prompt.wire_plan import WirePlan, digest_of_text, read_plan

Json = dict[str, Any]
POLL_S = 0.01


@dataclass
class Failure:
    """An answer that is none: a status and the error's fields, and seconds to wait."""

    status: int
    message: str
    code: str | None = None
    retry_after_ms: int | None = None


@dataclass
class OpenAIServer:
    """`failures` are used up one a request. `hold_after` pieces (0: before the headers) the server
    waits until the client goes away or `released` is set; `die_after` pieces it cuts the line, or
    ends the stream politely with `die_politely`. Of the paths in `drips` a body comes space by
    space and never ends; those in `late` are told nothing before `released` is set. `answer` takes
    the place of a whole answer.
    """

    models: list[str] = field(default_factory=lambda: ["tiny"])
    api_key: str | None = None
    pieces: list[Json] | None = None
    finish_reason: str = "stop"
    usage: Json = field(default_factory=lambda: {"prompt_tokens": 12, "completion_tokens": 3})
    logprobs: bool = False
    failures: list[Failure] = field(default_factory=list)
    refused: tuple[str, ...] = ()
    hold_after: int | None = None
    die_after: int | None = None
    die_politely: bool = False
    drips: tuple[str, ...] = ()
    late: tuple[str, ...] = ()
    answer: Json | None = None
    events: list[str] | None = None
    status: Json | None = None
    status_code: int = 200
    receipt: Json | None = None
    receipt_in_answer: bool = False
    requests: list[tuple[str, Json, dict[str, str]]] = field(default_factory=list)
    plans: list[WirePlan] = field(default_factory=list)
    disconnected: threading.Event = field(default_factory=threading.Event)
    holding: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> OpenAIServer:
        handler = type("Handler", (_Handler,), {"told": self})
        self._http = _Http(("127.0.0.1", 0), handler)
        self._thread = threading.Thread(target=self._http.serve_forever, args=(POLL_S,))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.released.set()
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}/v1"

    def bodies(self, path: str = "/v1/chat/completions") -> list[Json]:
        return [body for where, body, _ in self.requests if where == path]

    def asked(self, path: str) -> int:
        return sum(where == path for where, _, _ in self.requests)


class _Http(ThreadingHTTPServer):
    daemon_threads = False
    request_queue_size = 64

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news; the tests look at `disconnected`."""


class _Handler(BaseHTTPRequestHandler):
    told: OpenAIServer
    protocol_version = "HTTP/1.1"
    cut = False
    """The line is to be closed without the stream's end; clients ask for one request a line."""

    def log_message(self, format: str, *args: Any) -> None: ...

    def do_GET(self) -> None:
        self.told.requests.append((self.path, {}, dict(self.headers)))
        if self._is_stranger() or self._drips():
            return
        if self.path in self.told.late:
            self.told.holding.set()
            self.told.released.wait()
        found: dict[str, Json | None] = {
            "/v1/models": {"object": "list", "data": [_model(name) for name in self.told.models]},
            "/v1/cacheslide/status": self.told.status,
            "/v1/cacheslide/receipts/chatcmpl-1": self.told.receipt,
        }
        answer = found.get(self.path)
        if answer is None:
            self._fail(Failure(404, "Not Found"))
        else:
            asked = self.path.endswith("/status")
            self._send(self.told.status_code if asked else 200, answer)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.told.requests.append((self.path, body, dict(self.headers)))
        if self._is_stranger() or self._drips():
            return
        if self.told.failures:
            self._fail(self.told.failures.pop(0))
        elif body["model"] not in self.told.models:
            self._fail(Failure(404, f"The model `{body['model']}` does not exist."))
        elif refused := [name for name in self.told.refused if name in body]:
            self._fail(Failure(400, f"Unrecognized request argument: {refused[0]}"))
        else:
            self._keep_plan(body)
            self._answer(body)

    def _answer(self, body: Json) -> None:
        if self.told.hold_after == 0 and not self._hold():
            return
        if body.get("stream"):
            self._stream(body)
            return
        choices = [self._choice(body, place) for place in range(body.get("n", 1))]
        answer = _named(body, "chat.completion") | {"choices": choices, "usage": self.told.usage}
        if self.told.receipt_in_answer:
            answer["kv_transfer_params"] = {"cacheslide": {"receipt": self.told.receipt}}
        self._send(200, answer if self.told.answer is None else self.told.answer)

    def _stream(self, body: Json) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for event in self.told.events or self._events(body):
            self._chunk(f"data: {event}\n\n")
        if not self.cut:
            self._chunk("data: [DONE]\n\n")
            self.wfile.write(b"0\r\n\r\n")

    def _events(self, body: Json) -> Iterator[str]:
        """The events as JSON; ends the connection itself where the script wants that."""
        named = _named(body, "chat.completion.chunk")
        yield json.dumps(named | {"choices": [{"index": 0, "delta": {"role": "assistant"}}]})
        for sent, delta in enumerate(self._deltas(body)):
            if self.told.hold_after == sent and sent and not self._hold():
                return
            if self.told.die_after == sent:
                self._die()
                return
            choice = {"index": 0, "delta": delta, "finish_reason": None}
            if self.told.logprobs:
                choice["logprobs"] = _logprobs(delta["content"])
            yield json.dumps(named | {"choices": [choice]})
        end = {"index": 0, "delta": {}, "finish_reason": self.told.finish_reason}
        yield json.dumps(named | {"choices": [end]})
        if body.get("stream_options", {}).get("include_usage"):
            yield json.dumps(named | {"choices": [], "usage": self.told.usage})

    def _deltas(self, body: Json) -> list[Json]:
        if self.told.pieces is not None:
            return self.told.pieces
        words = body["messages"][-1]["content"].split()
        return [{"content": word if not place else f" {word}"} for place, word in enumerate(words)]

    def _choice(self, body: Json, place: int) -> Json:
        """The pieces as one message."""
        message: Json = {"role": "assistant", "content": None}
        for delta in self._deltas(body):
            for name, value in delta.items():
                known = message.get(name)
                message[name] = value if known is None else known + value
        choice = {"index": place, "message": message, "finish_reason": self.told.finish_reason}
        if self.told.logprobs:
            choice["logprobs"] = _logprobs(message["content"])
        return choice

    def _keep_plan(self, body: Json) -> None:
        given = body.get("kv_transfer_params", {}).get("cacheslide")
        if given is not None:
            turns = [(message["role"], message["content"]) for message in body["messages"]]
            plan = read_plan(given)
            if plan.unit == "tokens" or plan.digest == digest_of_text(turns):
                self.told.plans.append(plan)

    def _is_stranger(self) -> bool:
        key = self.told.api_key
        if key is None or self.headers.get("Authorization") == f"Bearer {key}":
            return False
        self._fail(Failure(401, f"Incorrect API key: {self.headers.get('Authorization')}"))
        return True

    def _drips(self) -> bool:
        if self.path not in self.told.drips:
            return False
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(1 << 30))
        self.end_headers()
        self.cut = True
        while not self.told.released.wait(POLL_S):
            self.wfile.write(b" ")
        return True

    def _fail(self, failure: Failure) -> None:
        error = {"message": failure.message, "type": "error", "code": failure.code}
        extra = {} if failure.retry_after_ms is None else {"retry-after-ms": failure.retry_after_ms}
        self._send(failure.status, {"error": error}, extra)

    def _send(self, status: int, answer: Json, headers: Json | None = None) -> None:
        data = json.dumps(answer).encode()
        self.send_response(status)
        said = {"Content-Type": "application/json", "Content-Length": len(data)}
        for name, value in {**said, **(headers or {})}.items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(data)

    def _chunk(self, text: str) -> None:
        data = text.encode()
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def _die(self) -> None:
        if self.told.die_politely:
            self.wfile.write(b"0\r\n\r\n")
        self.cut = True

    def _hold(self) -> bool:
        """Wait; whether the client is still there afterwards."""
        self.told.holding.set()
        while not self.told.released.is_set():
            readable, _, _ = select.select([self.connection], [], [], POLL_S)
            if readable and not self.connection.recv(1, socket.MSG_PEEK):
                self.told.disconnected.set()
                self.cut = True
                return False
        return True


def _named(body: Json, kind: str) -> Json:
    return {"id": "chatcmpl-1", "object": kind, "created": 0, "model": body["model"]}


def _model(name: str) -> Json:
    return {"id": name, "object": "model", "created": 0, "owned_by": "tests"}


def _logprobs(text: str) -> Json:
    """Every piece counts as one token, of log-probability -0.5."""
    other = {"token": "no", "logprob": -1.5, "bytes": None}
    entry = {"token": text, "logprob": -0.5, "bytes": None, "top_logprobs": [other]}
    return {"content": [entry], "refusal": None}
