"""What an agent can tell its model's backend besides prompts.

In: a model as an agent holds it, bound or wrapped. Out: hints to the backend of the
`ChatCacheSlide` inside; for any other model they do nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from langchain_core.messages import BaseMessage
from langchain_core.runnables import Runnable, RunnableConfig

from cacheslide_agents.backend import Backend
from cacheslide_agents.errors import PromptError
from langchain_cacheslide import parameters
from langchain_cacheslide.chat_model import ChatCacheSlide
from langchain_cacheslide.request import prepare


def chat_model_in(model: Any) -> ChatCacheSlide | None:
    """The `ChatCacheSlide` that answers in the end, below bindings and replays, if there is one."""
    while not isinstance(model, ChatCacheSlide):
        model = _inside(model)
        if not isinstance(model, Runnable):
            return None
    return model


def _inside(model: Any) -> Any:
    """What a binding or a replay is around."""
    return getattr(model, "bound", None) or getattr(model, "model", None)


def named_in(model: Any, found: ChatCacheSlide, name: str) -> Any:
    """The setting that calls of `model` name: the outermost binding's, else that of `found`, the
    chat model inside."""
    while model is not found:
        given = getattr(model, "kwargs", None) or {}
        if name in given and parameters.is_given(name, given[name]):
            return given[name]
        model = _inside(model)
    return getattr(found, name)


def in_session(model: Runnable[Any, Any], session: str | None) -> Runnable[Any, Any]:
    """`model`, whose calls name `session`, unless it names one itself or knows no sessions."""
    found = chat_model_in(model)
    if session is None or found is None or named_in(model, found, "session"):
        return model
    return model.bind(session=session)


def dense(model: Runnable[Any, Any]) -> Runnable[Any, Any]:
    """`model` without reuse, for judges and critics; other models are left as they are."""
    return model if chat_model_in(model) is None else model.bind(reuse=False)


def thread_of(config: RunnableConfig) -> str | None:
    """The graph's thread, which names the session of its calls."""
    thread = config.get("configurable", {}).get("thread_id")
    return None if thread is None else str(thread)


class SessionHints:
    """Pins, refreshes and releases the session that calls of `model` name, or else `session`.

    Does nothing for a model elsewhere: its server knows no hints.
    """

    def __init__(self, model: Any, session: str | None) -> None:
        found = chat_model_in(model)
        self._model = None if found is None or found.is_remote else found
        self._name: str | None = None
        self._whose: tuple[str, str] | None = None
        if found is not None:
            self._name = named_in(model, found, "model")
            session = named_in(model, found, "session") or session
            namespace = named_in(model, found, "namespace")
            self._whose = None if session is None else (session, namespace)

    def are_those_of(self, other: SessionHints) -> bool:
        """Whether both are about the same context."""
        same = self._model is other._model and self._name == other._name
        return same and self._whose == other._whose

    def tool_runs(self) -> None:
        """A tool is about to run: keep what is stored, and use the idle time to refresh it."""
        for backend, whose in self._told():
            backend.pin(*whose)
            backend.refresh(*whose)

    def release(self) -> None:
        """Nothing needs to be kept any longer."""
        for backend, whose in self._told():
            backend.release(*whose)

    def _told(self) -> Iterator[tuple[Backend, tuple[str, str]]]:
        if self._model is not None and self._whose is not None:
            yield self._model.model_copy(update={"model": self._name}).load(), self._whose


def warm(model: ChatCacheSlide, messages: Sequence[BaseMessage], **given: Any) -> None:
    """Have the backend compute and keep what a prompt that begins with `messages` will need.

    `given` as in a call: `tools`, `task`, `session`. A chat template that refuses so short a
    conversation leaves the cache cold.
    """
    if model.is_remote:
        return
    own = {name: getattr(model, name) for name in parameters.SETTINGS}
    settings = parameters.merge(own, None, given)
    with suppress(PromptError):
        prepared = prepare(lambda _: model.load(), model.loader, messages, settings)
        prepared.backend.warm(prepared.request)
