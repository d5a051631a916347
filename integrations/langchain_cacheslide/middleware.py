"""Agent middleware: what an agent of `create_agent` can tell the backend besides its prompts.

In: the steps of an agent whose model is a `ChatCacheSlide`. Out: the same steps, with the prompt's
chunks marked, the session named, and hints to the backend: warm at the start, pin and refresh while
a tool runs, release at the end. Any other model is left alone. Needs the extra `agents`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from threading import RLock
from typing import Annotated, Any, NotRequired
from uuid import uuid4

from langchain.agents.middleware import (
    AgentMiddleware,
    AgentState,
    ModelRequest,
    ModelResponse,
    ToolCallRequest,
)
from langchain.agents.middleware.types import PrivateStateAttr
from langchain_core.messages import SystemMessage, ToolMessage
from langchain_core.tools import BaseTool
from langgraph.runtime import Runtime
from langgraph.types import Command

from langchain_cacheslide.binding import openai_tool
from langchain_cacheslide.chat_model import ChatCacheSlide
from langchain_cacheslide.hints import SessionHints, chat_model_in, named_in, warm
from langchain_cacheslide.marks import marked_messages, marked_system

Respond = Callable[[ModelRequest[Any]], ModelResponse[Any]]
RespondAsync = Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]]
Outcome = ToolMessage | Command[Any]


class CacheSlideState(AgentState[Any]):
    """The session travels with the thread, and neither into its input nor its output."""

    cacheslide_session: NotRequired[Annotated[str, PrivateStateAttr]]


class CacheSlideMiddleware(AgentMiddleware[CacheSlideState, Any, Any]):
    """Marks chunks and gives hints; put it last in the list, so that it sees the final prompt.

        agent = create_agent(model, tools, middleware=[CacheSlideMiddleware()])

    `model`, `system_prompt` and `tools`, the same as the agent's: their part of the prompt is
    computed when the first run starts, or before, by `warm()`. Without them the start is not
    warmed. The session is the request's own, else the thread's id, or a new one for each run that
    has no thread. `task` names the kind of prompt. Blocks from `chunk_block` keep their ids; what
    else the system prompt holds is marked as reusable, and every message by its own id.
    """

    state_schema = CacheSlideState

    def __init__(
        self,
        *,
        model: ChatCacheSlide | None = None,
        system_prompt: str | SystemMessage | None = None,
        tools: Sequence[BaseTool | Callable[..., Any] | dict[str, Any]] = (),
        task: str | None = None,
    ) -> None:
        super().__init__()
        self.tools = []
        self._task = task
        self._model = model
        self._system = system_prompt
        self._schemas = [openai_tool(tool) for tool in tools]
        self._is_warm = model is None or system_prompt is None
        self._warming = RLock()
        self._asked: dict[str, SessionHints] = {}
        self._pinned: dict[str, SessionHints] = {}

    def warm(self) -> None:
        """Compute and keep what every run's prompt begins with; ahead of the first run, say."""
        with self._warming:
            if self._model is not None and self._system is not None:
                told = self._system
                system = SystemMessage(told) if isinstance(told, str) else told
                warm(self._model, [marked_system(system)], tools=self._schemas, task=self._task)
            self._is_warm = True

    def before_agent(self, state: CacheSlideState, runtime: Runtime[Any]) -> dict[str, Any] | None:
        with self._warming:
            if not self._is_warm:
                self.warm()
        return {"cacheslide_session": _session(runtime)}

    async def abefore_agent(
        self, state: CacheSlideState, runtime: Runtime[Any]
    ) -> dict[str, Any] | None:
        return await asyncio.to_thread(self.before_agent, state, runtime)

    def wrap_model_call(self, request: ModelRequest[Any], handler: Respond) -> ModelResponse[Any]:
        model = chat_model_in(request.model)
        if model is None:
            return handler(request)
        try:
            answer = handler(self._told(request, model))
        except BaseException:
            self._forget(request.state)
            raise
        self._unpin(request.state)
        return answer

    async def awrap_model_call(
        self, request: ModelRequest[Any], handler: RespondAsync
    ) -> ModelResponse[Any]:
        model = chat_model_in(request.model)
        if model is None:
            return await handler(request)
        try:
            answer = await handler(self._told(request, model))
        except BaseException:
            self._forget(request.state)
            raise
        await asyncio.to_thread(self._unpin, request.state)
        return answer

    def wrap_tool_call(
        self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], Outcome]
    ) -> Outcome:
        """The session stays pinned until the model has seen the result.

        A tool that raises ends that at once, even with others still running: its run may end here.
        """
        self._pin(request.state)
        try:
            return handler(request)
        except BaseException:
            self._forget(request.state)
            raise

    async def awrap_tool_call(
        self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], Awaitable[Outcome]]
    ) -> Outcome:
        await asyncio.to_thread(self._pin, request.state)
        try:
            return await handler(request)
        except BaseException:
            self._forget(request.state)
            raise

    def after_agent(self, state: CacheSlideState, runtime: Runtime[Any]) -> None:
        self._forget(state)

    async def aafter_agent(self, state: CacheSlideState, runtime: Runtime[Any]) -> None:
        await asyncio.to_thread(self.after_agent, state, runtime)

    def _told(self, request: ModelRequest[Any], model: ChatCacheSlide) -> ModelRequest[Any]:
        """The request as it is sent; what it names is what will be pinned and released."""
        thread = _thread_in(request.state)
        settings = self._settings(request, model, thread)
        self._asked[thread] = SessionHints(model.bind(**settings), None)
        system = request.system_message
        return request.override(
            system_message=None if system is None else marked_system(system),
            messages=marked_messages(request.messages),
            model_settings=settings,
        )

    def _settings(
        self, request: ModelRequest[Any], model: ChatCacheSlide, thread: str
    ) -> dict[str, Any]:
        """`create_agent` may bind tools to the model itself and lose what a binding names."""
        task = {} if self._task is None else {"task": self._task}
        return {
            "session": named_in(request.model, model, "session") or thread,
            "namespace": named_in(request.model, model, "namespace"),
            **task,
            **request.model_settings,
        }

    def _pin(self, state: Any) -> None:
        thread = _thread_in(state)
        if asked := self._asked.get(thread):
            self._pinned[thread] = asked
            asked.tool_runs()

    def _unpin(self, state: Any) -> None:
        if pinned := self._pinned.pop(_thread_in(state), None):
            pinned.release()

    def _forget(self, state: Any) -> None:
        thread = _thread_in(state)
        asked, pinned = self._asked.pop(thread, None), self._pinned.pop(thread, None)
        if asked is not None:
            asked.release()
        if pinned is not None and (asked is None or not asked.are_those_of(pinned)):
            pinned.release()


def _session(runtime: Runtime[Any]) -> str:
    info = runtime.execution_info
    thread = None if info is None else info.thread_id
    return thread or f"run-{uuid4().hex}"


def _thread_in(state: Any) -> str:
    """What tells this run from others: the session of its calls, unless they name another."""
    return str(state.get("cacheslide_session", ""))
