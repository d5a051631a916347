"""One server: the connections to it, and what it is.

In: base URL, key, model. Out: an `openai` client per event loop, a loop for callers who have none,
and the server's `Facts`, asked once. How long a caller waits is said with each question.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit
from weakref import WeakKeyDictionary

from pydantic import SecretStr

from cacheslide_agents.errors import (
    BackendError,
    ModelNotFoundError,
    RequestError,
    RequestTimeoutError,
    install_hint,
)
from cacheslide_agents.prompt.wire_plan import PLAN_VERSION
from langchain_cacheslide.deadline import awhole
from langchain_cacheslide.loop_thread import LoopThread
from langchain_cacheslide.remote_errors import failure
from langchain_cacheslide.remote_question import Patience, SharedQuestion
from langchain_cacheslide.remote_receipt import NO_PLUGIN, checked

if TYPE_CHECKING:
    from openai import AsyncOpenAI, RequestOptions

_NO_KEY = "none"
_ASIDE_S = 5.0
"""Longest wait for what is not the answer itself: the status and the receipts."""
_NAMES_S = 60.0
"""Longest wait for the models' names, without which nothing can be asked."""
_ASK_AGAIN_S = 60.0
"""After a status that could not be had, seconds until it is asked for again."""


@dataclass(frozen=True, slots=True)
class Facts:
    """`model`: the name to send. `reason`: why no plan is sent; empty if plans are welcome."""

    model: str
    reason: str


class Server:
    """Safe to call from several threads and event loops. Connections end with their request.

    So nothing is left open for an event loop to outlive, and nothing needs closing; a handshake
    per request is nothing beside a prefill.
    """

    def __init__(
        self,
        base_url: str,
        api_key: SecretStr | None,
        model: str | None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.url = _checked_url(base_url)
        self.api_key = api_key
        self._model = model
        self._clock = clock
        self.loop = LoopThread()
        self._lock = Lock()
        self._clients: WeakKeyDictionary[asyncio.AbstractEventLoop, AsyncOpenAI] = (
            WeakKeyDictionary()
        )
        self._naming: SharedQuestion[list[str]] = SharedQuestion(self.loop)
        self._asking: SharedQuestion[tuple[str, float]] = SharedQuestion(self.loop)
        self._status: tuple[str, float] | None = None

    def client(self, patience: Patience) -> AsyncOpenAI:
        """The client of the running event loop, whose requests wait and try as `patience` has it.

        A view of it, made for one call; what holds connections is there once.
        """
        given: dict[str, Any] = {} if patience.timeout is None else {"timeout": patience.timeout}
        whole = self._shared_client()
        return _impersonal(whole.with_options(max_retries=patience.max_retries, **given))

    def facts(self, patience: Patience) -> Facts:
        """Asked from the server at the first call. Raises when it cannot name one model."""
        _openai()
        if self._model is None:
            self._model = self._only_model(patience)
        return Facts(self._model, self._no_plan(patience))

    def receipt(self, answer_id: str, patience: Patience) -> dict[str, Any] | None:
        """The receipt of an answer that did not bring it along; `None` if it cannot be had."""
        path = f"/cacheslide/receipts/{quote(answer_id, safe='')}"
        try:
            found = self.loop.result(lambda: self._told(path, _aside(patience)))
        except Exception:
            return None
        return checked(found)

    async def _told(self, path: str, seconds: float) -> object:
        """What one of the plugin's own paths answers."""
        options: RequestOptions = {"timeout": seconds, "max_retries": 0}
        get = self._shared_client().get
        return await awhole(lambda: get(path, cast_to=object, options=options), seconds)

    def _shared_client(self) -> AsyncOpenAI:
        loop = asyncio.get_running_loop()
        with self._lock:
            if loop not in self._clients:
                self._clients[loop] = self._made()
            return self._clients[loop]

    def _made(self) -> AsyncOpenAI:
        key = self.api_key.get_secret_value() if self.api_key else ""
        client: AsyncOpenAI = _openai().AsyncOpenAI(
            base_url=self.url, api_key=key or _NO_KEY, default_headers={"Connection": "close"}
        )
        return _impersonal(client)

    def _only_model(self, patience: Patience) -> str:
        try:
            names = self._names_within(patience.timeout or _NAMES_S, patience.max_retries)
        except Exception as error:
            raise failure(error, url=self.url, secret=self.api_key) from None
        if len(names) == 1:
            return names[0]
        listed = ", ".join(map(repr, sorted(names)[:20])) or "none"
        raise ModelNotFoundError(
            f"the server at {self.url} serves {len(names)} models: {listed}; say which with `model`"
        )

    def _names_within(self, seconds: float, max_retries: int) -> list[str]:
        """A shared question ends with the time of who began it; who has more asks again."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            ask = partial(self._names, Patience(left, max_retries))
            with suppress(TimeoutError):
                return self._naming.answer(ask, left)
        raise RequestTimeoutError(seconds)

    async def _names(self, patience: Patience) -> list[str]:
        models = self.client(patience).models

        async def listed() -> list[str]:
            return [model.id for model in (await models.list()).data or ()]

        return await awhole(listed, patience.timeout)

    def _no_plan(self, patience: Patience) -> str:
        """Why no plan is sent; "" if one is. No caller's haste spoils the answer for the others."""
        status = self._status
        if status is None or self._clock() >= status[1]:
            seconds = _aside(patience)
            whole = None if seconds == _ASIDE_S else seconds
            try:
                status = self._asking.answer(self._asked_status, whole)
            except TimeoutError:
                return NO_PLUGIN
        return status[0]

    async def _asked_status(self) -> tuple[str, float]:
        self._status = await self._told_status()
        return self._status

    async def _told_status(self) -> tuple[str, float]:
        """Why no plan is sent ("" if one is), and until when that is taken for true."""
        import openai

        try:
            status = await self._told("/cacheslide/status", _ASIDE_S)
        except openai.APIStatusError as error:
            sure = error.status_code < 500 and error.status_code != 429
            return NO_PLUGIN, float("inf") if sure else self._clock() + _ASK_AGAIN_S
        except Exception:
            return NO_PLUGIN, self._clock() + _ASK_AGAIN_S
        told = status if isinstance(status, Mapping) else {}
        if isinstance(off := told.get("off"), str) and off:
            return f"the server's reuse is off: {off:.300}", float("inf")
        versions = told.get("plan_versions")
        if not isinstance(versions, list):
            return NO_PLUGIN, float("inf")
        if PLAN_VERSION in versions:
            return "", float("inf")
        return f"the server reads plan versions {versions}, not {PLAN_VERSION}", float("inf")


def _aside(patience: Patience) -> float:
    """Seconds for what is not the answer itself."""
    return min(patience.timeout or _ASIDE_S, _ASIDE_S)


def _impersonal(client: AsyncOpenAI) -> AsyncOpenAI:
    """`client`, which sends nothing of what the environment holds for OpenAI itself."""
    client.organization = client.project = None
    return client


def _openai() -> Any:
    try:
        import openai
    except ImportError as error:
        raise BackendError(
            f"base_url needs the package `openai`, which is not installed; {install_hint('remote')}"
        ) from error
    return openai


def _checked_url(url: str) -> str:
    """`url` without a trailing slash; it may appear in messages, so it may hold no secret."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise RequestError(
            "base_url must start with http:// or https:// and name a host, "
            "as in http://127.0.0.1:8000/v1"
        )
    if parts.username or parts.password or parts.query:
        raise RequestError("base_url must hold no user, password or query; use api_key for secrets")
    return url.rstrip("/")
