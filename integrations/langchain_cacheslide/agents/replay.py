"""Recorded answers in place of a model's own.

In: an agent's prompts, and the answers a stronger model once gave. Out: those answers; the model is
asked all the same, so that its prompts, its reuse and its times are real although it is weak.
"""

from __future__ import annotations

from collections.abc import Sequence
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

    def __init__(self, model: Runnable[Any, Any], answers: Sequence[str | None]) -> None:
        self.model = model
        self._answers = answers
        self._given = 0

    def invoke(
        self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any
    ) -> AIMessage:
        return self._replaced(self.model.invoke(input, self._telling(config), **kwargs))

    async def ainvoke(
        self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any
    ) -> AIMessage:
        return self._replaced(await self.model.ainvoke(input, self._telling(config), **kwargs))

    def _telling(self, config: RunnableConfig | None) -> RunnableConfig:
        if self._given >= len(self._answers):
            raise DataError(
                f"the recording ends after {self._given} answers, but the agent goes on; "
                "bound its steps by the recording's length"
            )
        return merge_configs(config, {"metadata": {RECORDED: self._answers[self._given]}})

    def _replaced(self, own: AIMessage) -> AIMessage:
        recorded = self._answers[self._given]
        self._given += 1
        return own if recorded is None else own.model_copy(update={"content": recorded})
