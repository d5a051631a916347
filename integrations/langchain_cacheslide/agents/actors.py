"""How a Reflexion agent tries a question: by reasoning over its passages.

In: a question, lessons of earlier attempts. Out: an `Attempt`; and after a failed one, the lesson.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from langchain_core.runnables import Runnable, RunnableConfig

from langchain_cacheslide.agents.calls import asking
from langchain_cacheslide.template import TemplateRunnable

THINK = "Think step by step in at most three sentences, and give no answer yet.\nThought:"
REFLECT = (
    "Do not answer the question now. In one or two sentences, say what went wrong in the attempt "
    "above and what you will do differently the next time.\nReflection:"
)
_FINISH = re.compile(r"Finish\[(.*?)\]", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Question:
    """`passages` are mappings with `title` and `text`."""

    text: str
    passages: Sequence[Mapping[str, str]] = ()


@dataclass(frozen=True, slots=True)
class Attempt:
    """`trace` is what led to `answer`, in full."""

    trace: str
    answer: str


class Actor(Protocol):
    """A way to attempt a question. Both methods ask a model and may raise what it raises."""

    def attempt(
        self, question: Question, reflections: Sequence[str], config: RunnableConfig
    ) -> Attempt: ...

    def reflect(
        self,
        question: Question,
        reflections: Sequence[str],
        failed: Attempt,
        config: RunnableConfig,
    ) -> str: ...


@dataclass(frozen=True)
class ChainOfThought:
    """Reads all passages, thinks aloud, then answers: two calls, prompts of `reflexion.jinja`.

    `examples` are mappings with `question` and `answer`. (Shinn et al. 2023: "CoT (GT)".)
    """

    model: Runnable[Any, Any]
    examples: Sequence[Mapping[str, str]] = ()
    template: TemplateRunnable = field(default_factory=lambda: TemplateRunnable.named("reflexion"))

    def attempt(
        self, question: Question, reflections: Sequence[str], config: RunnableConfig
    ) -> Attempt:
        values = self._values(question, reflections)
        thought = one_line(self._ask("think", {**values, "cue": THINK}, config))
        said = self._ask("answer", {**values, "thought": thought}, config)
        return Attempt(f"Thought: {thought}\nAnswer: {said.strip()}", short_answer(said))

    def reflect(
        self,
        question: Question,
        reflections: Sequence[str],
        failed: Attempt,
        config: RunnableConfig,
    ) -> str:
        values = {**self._values(question, reflections), "last_attempt": failed.trace}
        return one_line(self._ask("reflect", {**values, "cue": REFLECT}, config))

    def _values(self, question: Question, reflections: Sequence[str]) -> dict[str, Any]:
        return {
            "examples": list(self.examples),
            "reflections": list(reflections),
            "paragraphs": list(question.passages),
            "question": question.text,
        }

    def _ask(self, step: str, values: dict[str, Any], config: RunnableConfig) -> str:
        chain = self.template | asking(self.model, step, config)
        return str(chain.invoke(values, config).text)


def one_line(text: str) -> str:
    return " ".join(text.split())


def short_answer(said: str) -> str:
    """What `Finish[...]` holds, or else the first line, without the word that leads it in."""
    finished = _FINISH.findall(said)
    line = finished[-1] if finished else next(iter(said.strip().splitlines()), "")
    return one_line(line).removeprefix("Answer:").strip()
