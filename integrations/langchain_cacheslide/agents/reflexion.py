"""The Reflexion loop as a LangGraph graph: act, evaluate, reflect, act again.

In: `{"question": ..., "passages": [{title, text}, ...]}`. Out: attempts with their scores, and the
reflections between them (Shinn et al. 2023).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import add
from typing import Annotated, Any, TypedDict

from langchain_core.runnables import Runnable, RunnableConfig
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph

from cacheslide_agents.errors import RequestError
from langchain_cacheslide.agents.actors import Actor, Attempt, Question
from langchain_cacheslide.agents.calls import asking
from langchain_cacheslide.hints import dense

Evaluator = Callable[[Question, Attempt, RunnableConfig], float]
"""Scores an attempt from 0 (wrong) to 1 (right)."""


class Tried(TypedDict):
    trace: str
    answer: str


class ReflexionState(TypedDict, total=False):
    """What a checkpoint holds; plain values only."""

    question: str
    passages: Sequence[Mapping[str, str]]
    reflections: Annotated[list[str], add]
    attempts: Annotated[list[Tried], add]
    scores: Annotated[list[float], add]


Graph = CompiledStateGraph[Any, Any, Any, Any]


def reflexion_graph(
    actor: Actor,
    evaluate: Evaluator,
    *,
    trials: int = 3,
    enough: float = 1.0,
    checkpointer: BaseCheckpointSaver[Any] | None = None,
) -> Graph:
    """At most `trials` attempts, ended by the first whose score is at least `enough`.

    Raises `RequestError` for fewer than one trial.
    """
    if trials < 1:
        raise RequestError(f"trials={trials} must be at least 1")

    def act(state: ReflexionState, config: RunnableConfig) -> ReflexionState:
        done = actor.attempt(_question(state), state.get("reflections", []), config)
        return {"attempts": [{"trace": done.trace, "answer": done.answer}]}

    def judge(state: ReflexionState, config: RunnableConfig) -> ReflexionState:
        return {"scores": [evaluate(_question(state), _last(state), config)]}

    def reflect(state: ReflexionState, config: RunnableConfig) -> ReflexionState:
        lesson = actor.reflect(_question(state), state.get("reflections", []), _last(state), config)
        return {"reflections": [lesson]}

    def goes_on(state: ReflexionState) -> str:
        solved = state["scores"][-1] >= enough
        return END if solved or len(state["attempts"]) >= trials else "reflect"

    graph = StateGraph(ReflexionState)
    graph.add_node("act", act)
    graph.add_node("evaluate", judge)
    graph.add_node("reflect", reflect)
    graph.add_edge(START, "act")
    graph.add_edge("act", "evaluate")
    graph.add_conditional_edges("evaluate", goes_on, ["reflect", END])
    graph.add_edge("reflect", "act")
    return graph.compile(checkpointer=checkpointer, name="reflexion")


class ModelJudge:
    """An evaluator that asks a model, densely: a judge must not be led by approximate caches."""

    def __init__(self, model: Runnable[Any, Any], gold: str | None = None) -> None:
        self._model = dense(model)
        self._gold = gold

    def __call__(self, question: Question, attempt: Attempt, config: RunnableConfig) -> float:
        known = "" if self._gold is None else f"The right answer is: {self._gold}\n"
        prompt = (
            f"Question: {question.text}\n{known}Somebody answered: {attempt.answer}\n"
            "Is that answer right? Reply with yes or no."
        )
        answer = asking(self._model, "judge", config).invoke(prompt, config)
        return float(answer.text.strip().lower().startswith("yes"))


def _question(state: ReflexionState) -> Question:
    return Question(state["question"], state.get("passages", ()))


def _last(state: ReflexionState) -> Attempt:
    last = state["attempts"][-1]
    return Attempt(last["trace"], last["answer"])
