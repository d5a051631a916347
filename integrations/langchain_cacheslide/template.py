"""A prompt template as a LangChain Runnable, so that `template | model` works.

In: a mapping of the template's values. Out: a prompt value whose messages carry the chunks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

from langchain_core.prompt_values import PromptValue
from langchain_core.runnables import RunnableConfig, RunnableSerializable
from pydantic import ConfigDict

from cacheslide_agents.prompt.template import PromptTemplate
from langchain_cacheslide.messages import to_prompt_value


class TemplateRunnable(RunnableSerializable[dict[str, Any], PromptValue]):
    """Renders `template` with the values it is given. Raises `TemplateError` as `render` does."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    template: PromptTemplate

    @classmethod
    def named(cls, name: str) -> Self:
        """A packaged template: `reflexion`, `memgpt` or `swe_agent`."""
        return cls(template=PromptTemplate.named(name))

    @classmethod
    def from_file(cls, path: str | Path, *, task: str | None = None) -> Self:
        return cls(template=PromptTemplate.from_file(path, task=task))

    def invoke(
        self, input: dict[str, Any], config: RunnableConfig | None = None, **kwargs: Any
    ) -> PromptValue:
        return self._call_with_config(self._render, input, config, run_type="prompt", **kwargs)

    def _render(self, values: dict[str, Any]) -> PromptValue:
        return to_prompt_value(self.template.render(**values))
