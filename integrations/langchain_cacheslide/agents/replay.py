"""Recorded answers in place of a model's own.

In: an agent's prompts, and the answers a stronger model once gave. Out: those answers; the model is
asked all the same, so that its prompts, its reuse and its times are real although it is weak.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import AIMessage
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import merge_configs

from cacheslide_agents.errors import DataError
from langchain_cacheslide.agents.calls import RECORDED


class Replayed(Runnable[LanguageModelInput, AIMessage]):
    """`model`, whose answers are generated, thrown away and replaced by `answers`, in order.

    An answer of `None` keeps the model's own. The message's metadata stay the model's, and
    callbacks are told of the recorded answer in the call's metadata. Good for one episode:
    `DataError` when the recording is at its end. A call that fails uses no answer up.
    """

    def __init__(self, model: Runnable[Any, Any], answers: Iterable[str | None]) -> None:
        self.model = model
        self._answers = deque(answers)
        self._length = len(self._answers)

    def invoke(
        self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any
    ) -> AIMessage:
        with self._next() as recorded:
            own = self.model.invoke(input, _telling(config, recorded), **kwargs)
        return _replaced(own, recorded)

    async def ainvoke(
        self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any
    ) -> AIMessage:
        with self._next() as recorded:
            own = await self.model.ainvoke(input, _telling(config, recorded), **kwargs)
        return _replaced(own, recorded)

    @contextmanager
    def _next(self) -> Iterator[str | None]:
        """The answer of one call, which a call that fails gives back."""
        try:
            recorded = self._answers.popleft()
        except IndexError:
            raise DataError(
                f"the recording ends after {self._length} answers, but the agent goes on; "
                "bound its steps by the recording's length"
            ) from None
        try:
            yield recorded
        except BaseException:
            self._answers.appendleft(recorded)
            raise


def _telling(config: RunnableConfig | None, recorded: str | None) -> RunnableConfig:
    return merge_configs(config, {"metadata": {RECORDED: recorded}})


def _replaced(own: AIMessage, recorded: str | None) -> AIMessage:
    return own if recorded is None else own.model_copy(update={"content": recorded})
