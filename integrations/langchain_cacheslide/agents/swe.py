"""A SWE-agent-style loop as a LangGraph graph: one command at a time, until it submits.

In: `{"issue": ...}` and a shell in a repository. Out: what was run, and whether the repository's
own test passes. System | issue | history with older observations elided | cue, by
`swe_agent.jinja` (SWE-agent: Yang et al. 2024).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from operator import add
from typing import Annotated, Any, Protocol, TypedDict

from langchain_core.runnables import Runnable, RunnableConfig
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph

from cacheslide_agents.errors import RequestError
from langchain_cacheslide.agents.calls import asking
from langchain_cacheslide.hints import SessionHints, thread_of
from langchain_cacheslide.template import TemplateRunnable

SYSTEM = (
    "You are a programmer at a shell, in the folder of a repository. You see and change files with "
    "ordinary commands; nobody else types. Each of your messages says in a sentence or two what "
    "you do next and why, and then holds exactly one command in a fenced block:\n\n"
    "I look at the files first.\n```bash\nls\n```\n\n"
    "When the issue is solved, the command is: submit"
)
SUBMIT = "submit"
SHOWN_OBSERVATIONS = 5
NO_COMMAND = "Your message holds no command. Give exactly one, in a fenced block."
ELIDED_TOKENS = 10
"""About what the template writes in place of an older observation."""
_FENCED = re.compile(r"```(?:[\w+#-]*[ \t]*\r?\n)?(.*?)```", re.DOTALL)


class Runs(Protocol):
    """What executes a command and describes its end as text: a `Shell`, or a recording."""

    def run(self, command: str) -> object: ...


class SweState(TypedDict, total=False):
    """What a checkpoint holds. `history` entries have `id`, `role` and `text`."""

    issue: str
    history: Annotated[list[dict[str, str]], add]
    submitted: bool
    passed: bool
    report: str


def swe_graph(
    model: Runnable[Any, Any],
    shell: Runs,
    *,
    test: str | None = None,
    steps: int = 15,
    system: str = SYSTEM,
    keep_observations: int = SHOWN_OBSERVATIONS,
    history_tokens: int = 3000,
    count_tokens: Callable[[str], int] = lambda text: len(text) // 4,
    command: Callable[[str], str | None] | None = None,
    checkpointer: BaseCheckpointSaver[Any] | None = None,
) -> CompiledStateGraph[Any, Any, Any, Any]:
    """At most `steps` commands, then the command `test`, whose exit code decides `passed`.

    Of the observations the last `keep_observations` are shown; the oldest exchanges leave the
    prompt when the history shown is over `history_tokens`. While a command runs, the model's
    session is pinned and may be refreshed. `command` finds the command in an answer (default:
    `command_in`). Raises `RequestError` for fewer than one step.
    """
    if steps < 1:
        raise RequestError(f"steps={steps} must be at least 1")
    agent = _Programmer(
        model,
        shell,
        test=test,
        steps=steps,
        system=system,
        keep_observations=keep_observations,
        shown=partial(
            window, keep_observations=keep_observations, budget=history_tokens, count=count_tokens
        ),
        command=command or command_in,
    )
    graph = StateGraph(SweState)
    graph.add_node("think", agent.think)
    graph.add_node("run", agent.run)
    graph.add_node("test", agent.check)
    graph.add_edge(START, "think")
    graph.add_edge("think", "run")
    graph.add_conditional_edges("run", agent.goes_on, ["think", "test"])
    graph.add_edge("test", END)
    return graph.compile(checkpointer=checkpointer, name="swe")


@dataclass(frozen=True, kw_only=True)
class _Programmer:
    """The graph's nodes. `shown` gives the part of a history that the prompt holds."""

    model: Runnable[Any, Any] = field(kw_only=False)
    shell: Runs = field(kw_only=False)
    test: str | None
    steps: int
    system: str
    keep_observations: int
    shown: Callable[[Sequence[Mapping[str, str]]], list[Mapping[str, str]]]
    command: Callable[[str], str | None]
    template: TemplateRunnable = field(default_factory=lambda: TemplateRunnable.named("swe_agent"))

    def think(self, state: SweState, config: RunnableConfig) -> SweState:
        history = state.get("history", [])
        values = {
            "system": self.system,
            "issue": state["issue"],
            "history": self.shown(history),
            "keep_observations": self.keep_observations,
        }
        chain = self.template | asking(self.model, "think", config)
        with self._released_on_error(config):
            said = chain.invoke(values, config)
        return {"history": [_entry(history, "assistant", said.text)]}

    def run(self, state: SweState, config: RunnableConfig) -> SweState:
        command = self.command(state["history"][-1]["text"])
        if command == SUBMIT:
            return {"submitted": True}
        with self._released_on_error(config):
            SessionHints(self.model, thread_of(config)).tool_runs()
            seen = NO_COMMAND if command is None else str(self.shell.run(command))
        return {"history": [_entry(state["history"], "user", seen)]}

    def check(self, state: SweState, config: RunnableConfig) -> SweState:
        SessionHints(self.model, thread_of(config)).release()
        if self.test is None:
            return {}
        result = self.shell.run(self.test)
        return {"passed": getattr(result, "code", None) == 0, "report": str(result)}

    @contextmanager
    def _released_on_error(self, config: RunnableConfig) -> Iterator[None]:
        """An episode that breaks off leaves nothing pinned."""
        try:
            yield
        except BaseException:
            SessionHints(self.model, thread_of(config)).release()
            raise

    def goes_on(self, state: SweState) -> str:
        commands = sum(entry["role"] == "assistant" for entry in state["history"])
        return "test" if state.get("submitted") or commands >= self.steps else "think"


def command_in(text: str) -> str | None:
    """The command of a message: its last fenced block, or a line that is just `submit`."""
    for block in reversed(_FENCED.findall(text)):
        if command := str(block).strip():
            return command
    return SUBMIT if SUBMIT in map(str.strip, text.splitlines()) else None


def window(
    history: Sequence[Mapping[str, str]],
    keep_observations: int,
    budget: int,
    count: Callable[[str], int],
) -> list[Mapping[str, str]]:
    """The newest exchanges whose shown text is within `budget` tokens, the last one in any case."""
    spent, seen, start = 0, 0, len(history)
    for index in reversed(range(len(history))):
        entry = history[index]
        seen += entry["role"] != "assistant"
        elided = entry["role"] != "assistant" and seen > keep_observations
        spent += ELIDED_TOKENS if elided else count(entry["text"])
        if spent > budget and start < len(history):
            break
        if entry["role"] == "assistant":
            start = index
    return list(history[start:])


def _entry(history: Sequence[Mapping[str, str]], role: str, text: str) -> dict[str, str]:
    """Numbered from the episode's start, so that an id stays when older entries leave."""
    return {"id": str(len(history) + 1), "role": role, "text": text}
