"""Recorded answers in place of a model's own.

In: an agent's prompts, and the answers a stronger model once gave. Out: those answers; the model is
asked all the same, so that its prompts, its reuse and its times are real although it is weak.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import AIMessage
from langchain_core.runnables import Runnable, RunnableConfig

from cacheslide_agents.errors import DataError


class Replayed(Runnable[LanguageModelInput, AIMessage]):
    """`model`, whose answers are generated, thrown away and replaced by `answers`, in order.

    An answer of `None` keeps the model's own. The message's metadata stay the model's. Good for one
    episode: `DataError` when the recording is at its end.
    """

    def __init__(self, model: Runnable[Any, Any], answers: Iterable[str | None]) -> None:
        self.model = model
        self._answers = iter(answers)
        self._given = 0

    def invoke(
        self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any
    ) -> AIMessage:
        return self._replaced(self.model.invoke(input, config, **kwargs))

    async def ainvoke(
        self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any
    ) -> AIMessage:
        return self._replaced(await self.model.ainvoke(input, config, **kwargs))

    def _replaced(self, own: AIMessage) -> AIMessage:
        try:
            recorded = next(self._answers)
        except StopIteration:
            raise DataError(
                f"the recording ends after {self._given} answers, but the agent goes on; "
                "bound its steps by the recording's length"
            ) from None
        self._given += 1
        return own if recorded is None else own.model_copy(update={"content": recorded})
