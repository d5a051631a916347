"""How a Reflexion agent tries a question: by rounds of thinking, acting and observing.

In: a question and passages that only `Search` and `Lookup` can see. Out: an `Attempt`, and lessons.
Prompts of `reflexion_react.jinja` (ReAct: Yao et al. 2023; with reflections: Shinn et al. 2023).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from langchain_core.runnables import Runnable, RunnableConfig

from langchain_cacheslide.agents.actors import REFLECT, Attempt, Question, one_line
from langchain_cacheslide.agents.calls import asking
from langchain_cacheslide.agents.passages import Passages
from langchain_cacheslide.template import TemplateRunnable

WORKED = {
    "question": "In which country does the river rise on whose banks the poet Ada Brook lived?",
    "trajectory": (
        "Thought 1: I have to find the river Ada Brook lived at, then where it rises.\n"
        "Action 1: Search[Ada Brook]\n"
        "Observation 1: Ada Brook was a poet. She lived in Linz, on the Danube.\n"
        "Thought 2: The river is the Danube. Where does it rise?\n"
        "Action 2: Search[Danube]\n"
        "Observation 2: The Danube is a river of Europe. It rises in Germany.\n"
        "Thought 3: It rises in Germany.\n"
        "Action 3: Finish[Germany]"
    ),
}
"""One worked trial, made up, so that a model sees the form of a round."""

_STOP = "\nObservation"
_ACTION = re.compile(r"Action(?: \d+)?:\s*(.*)", re.DOTALL)
_CALL = re.compile(r"(\w+)\[(.*)\]", re.DOTALL)


@dataclass(frozen=True)
class React:
    """At most `rounds` rounds of thought, action and observation.

    `observations`, by action, replace what the passages would show (for replays).
    """

    model: Runnable[Any, Any]
    rounds: int = 6
    examples: Sequence[Mapping[str, str]] = (WORKED,)
    observations: Mapping[str, str] | None = None
    template: TemplateRunnable = field(
        default_factory=lambda: TemplateRunnable.named("reflexion_react")
    )

    def attempt(
        self, question: Question, reflections: Sequence[str], config: RunnableConfig
    ) -> Attempt:
        passages, steps = Passages(question.passages), list[dict[str, str]]()
        chain = self.template | asking(self.model.bind(stop=[_STOP]), "act", config)
        for _ in range(self.rounds):
            values = {**self._values(question, reflections), "steps": steps}
            thought, action = parsed_round(chain.invoke(values, config).text)
            name, argument = parsed_action(action)
            if name == "finish":
                return Attempt(_written([*steps, {"thought": thought, "action": action}]), argument)
            observation = self._observe(passages, action, name, argument)
            steps.append({"thought": thought, "action": action, "observation": observation})
        return Attempt(_written(steps), "")

    def reflect(
        self,
        question: Question,
        reflections: Sequence[str],
        failed: Attempt,
        config: RunnableConfig,
    ) -> str:
        values = {**self._values(question, reflections), "last_trial": failed.trace, "steps": []}
        chain = self.template | asking(self.model, "reflect", config)
        return one_line(chain.invoke({**values, "cue": REFLECT}, config).text)

    def _values(self, question: Question, reflections: Sequence[str]) -> dict[str, Any]:
        return {
            "examples": list(self.examples),
            "reflections": list(reflections),
            "question": question.text,
        }

    def _observe(self, passages: Passages, action: str, name: str, argument: str) -> str:
        if self.observations is not None:
            return self.observations.get(action, "Nothing was recorded for this action.")
        if name == "search":
            return passages.search(argument)
        if name == "lookup":
            return passages.lookup(argument)
        return "That is no action. Use Search[name], Lookup[words] or Finish[answer]."


def parsed_round(text: str) -> tuple[str, str]:
    """Thought and action; a round without an action has an empty one."""
    found = _ACTION.search(text)
    thought = text[: found.start()] if found else text
    action = next(iter(found[1].strip().splitlines()), "") if found else ""
    return re.sub(r"^Thought(?: \d+)?:\s*", "", one_line(thought)), action.strip()


def parsed_action(action: str) -> tuple[str, str]:
    """Lower-case name and argument; both empty for what is no action."""
    found = _CALL.match(action)
    return (found[1].lower(), found[2].strip()) if found else ("", "")


def _written(steps: Sequence[Mapping[str, str]]) -> str:
    return "\n".join(
        f"{name.capitalize()} {number}: {text}"
        for number, step in enumerate(steps, start=1)
        for name, text in step.items()
    )
