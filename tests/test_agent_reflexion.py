"""The Reflexion graph with a model that follows a script."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import pytest
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.memory import InMemorySaver

from cacheslide_agents.errors import RequestError
from langchain_cacheslide import ChatCacheSlide
from langchain_cacheslide.agents import (
    Attempt,
    CallLog,
    ChainOfThought,
    ModelJudge,
    Question,
    React,
    reflexion_graph,
)
from langchain_cacheslide.agents.actors import short_answer
from langchain_cacheslide.agents.passages import Passages
from langchain_cacheslide.agents.react import parsed_action, parsed_round

PASSAGES = [
    {"title": "Mill", "text": "The mill stands by the Brook. It is old. It grinds rye."},
    {"title": "Brook", "text": "The Brook is a river."},
]
ASKED = {"question": "Which river?", "passages": PASSAGES}


def says_brook(question: Question, attempt: Attempt, config: RunnableConfig) -> float:
    return float(attempt.answer == "Brook")


@pytest.fixture
def scripted(support: Callable[[str], ModuleType]) -> Callable[[Iterable[str]], ChatCacheSlide]:
    support("fake_backend")
    backend = support("hinting_backend").HintingBackend
    return lambda answers: ChatCacheSlide(backend=backend(answers))


def test_failed_trials_are_reflected_on_and_the_right_one_ends_the_loop(scripted: Any) -> None:
    model = scripted(["a mill", "Mill", "Look for a river.", "the Brook", "Answer: Brook\nYes."])
    log = CallLog()
    done = reflexion_graph(ChainOfThought(model), says_brook).invoke(ASKED, {"callbacks": [log]})
    assert [one["answer"] for one in done["attempts"]] == ["Mill", "Brook"]
    assert (done["scores"], done["reflections"]) == ([0.0, 1.0], ["Look for a river."])
    assert [c.step for c in log.calls] == ["think", "answer", "reflect", "think", "answer"]


def test_prompts_come_from_the_template_and_carry_its_chunks(scripted: Any) -> None:
    model = scripted(["a mill", "Mill", "Look for a river.", "the Brook", "Brook"])
    reflexion_graph(ChainOfThought(model), says_brook).invoke(ASKED)
    spans = [[span.id for span in request.spans][:5] for request in model.backend.requests]
    assert spans == [["instruction", "examples", "reflections", "context", "cue"]] * 5
    assert {request.task for request in model.backend.requests} == {"reflexion"}
    think, answer, reflect, again, _ = model.backend.prompts()
    assert "Your reasoning so far: a mill" in answer
    assert "Thought: a mill\nAnswer: Mill" in reflect
    assert "- Look for a river." in again
    assert "Look for a river." not in think


def test_trials_are_bounded(scripted: Any) -> None:
    done = reflexion_graph(ChainOfThought(scripted(["no"])), says_brook, trials=2).invoke(ASKED)
    assert (done["scores"], len(done["reflections"])) == ([0.0, 0.0], 1)
    with pytest.raises(RequestError, match="trials=0"):
        reflexion_graph(ChainOfThought(scripted(["no"])), says_brook, trials=0)


def test_interrupted_episode_goes_on_from_its_checkpoint(scripted: Any) -> None:
    saver = InMemorySaver()
    thread: RunnableConfig = {"configurable": {"thread_id": "t"}}

    def broken(question: Question, attempt: Attempt, config: RunnableConfig) -> float:
        raise ConnectionError

    actor = ChainOfThought(scripted(["a mill", "Mill", "Look.", "the Brook", "Brook"]))
    with pytest.raises(ConnectionError):
        reflexion_graph(actor, broken, checkpointer=saver).invoke(ASKED, thread)
    done = reflexion_graph(actor, says_brook, checkpointer=saver).invoke(None, thread)
    assert [one["answer"] for one in done["attempts"]] == ["Mill", "Brook"]


def test_thread_names_the_session_of_every_call(scripted: Any) -> None:
    model = scripted(["Brook"])
    config: RunnableConfig = {"configurable": {"thread_id": "t7"}}
    reflexion_graph(ChainOfThought(model), says_brook).invoke(ASKED, config)
    assert {request.session for request in model.backend.requests} == {"t7"}


@pytest.mark.parametrize(("said", "score"), [("Yes, it is.", 1.0), ("no", 0.0), ("", 0.0)])
def test_judge_answers_densely(scripted: Any, said: str, score: float) -> None:
    model = scripted([said])
    judge = ModelJudge(model, gold="Brook")
    assert judge(Question("Which river?"), Attempt("", "Brook"), {}) == score
    (request,) = model.backend.requests
    assert (request.policy.name, request.retain) == ("recompute", False)


def test_rounds_act_on_the_passages_until_they_finish(scripted: Any) -> None:
    rounds = [
        "Thought 1: The mill.\nAction 1: Search[mill]\nObservation 1: invented",
        "I look for water.\nAction: Lookup[rye]",
        "Thought 3: hm",
        "Thought 4: So.\nAction 4: Finish[ Brook ]",
    ]
    model = scripted(rounds)
    done = reflexion_graph(React(model), says_brook).invoke(ASKED)
    assert done["scores"] == [1.0]
    assert done["attempts"][0]["trace"].splitlines() == [
        "Thought 1: The mill.",
        "Action 1: Search[mill]",
        "Observation 1: The mill stands by the Brook. It is old. It grinds rye.",
        "Thought 2: I look for water.",
        "Action 2: Lookup[rye]",
        "Observation 2: It grinds rye.",
        "Thought 3: hm",
        "Action 3: ",
        "Observation 3: That is no action. Use Search[name], Lookup[words] or Finish[answer].",
        "Thought 4: So.",
        "Action 4: Finish[ Brook ]",
    ]
    assert model.backend.requests[0].sampling.stop == ("\nObservation",)
    assert "Observation 2: It grinds rye." in model.backend.prompts()[2]


def test_rounds_that_never_finish_are_reflected_on_with_all_they_did(scripted: Any) -> None:
    model = scripted(["Thought: ?\nAction: Search[Mil]", "Use the title.", "Action: Finish[Brook]"])
    done = reflexion_graph(React(model, rounds=1), says_brook, trials=2).invoke(ASKED)
    assert (done["scores"], done["reflections"]) == ([0.0, 1.0], ["Use the title."])
    assert "Could not find Mil. Similar: Mill, Brook." in model.backend.prompts()[1]


def test_search_and_lookup_behave_as_react_says() -> None:
    passages = Passages(PASSAGES)
    assert passages.lookup("it") == "There is no article yet; use Search[name] first."
    assert passages.search("MILL ") == PASSAGES[0]["text"]
    found = [passages.lookup("it") for _ in range(3)]
    assert found == ["It is old.", "It grinds rye.", "No more sentences hold it."]
    assert passages.search("old brook") == "Could not find old brook. Similar: Brook, Mill."


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("Thought 2: a\nb\nAction 2: Search[x]\nObservation", ("a b", "Search[x]")),
        ("only thinking", ("only thinking", "")),
        ("Action: Finish[a [b]]", ("", "Finish[a [b]]")),
        ("", ("", "")),
    ],
)
def test_rounds_are_parsed(text: str, parsed: tuple[str, str]) -> None:
    assert parsed_round(text) == parsed


def test_actions_and_answers_are_parsed() -> None:
    assert parsed_action("Finish[a [b]]") == ("finish", "a [b]")
    assert parsed_action("Search Rome") == ("", "")
    said = ["Finish[GmbH]", "Answer: Rome\nmore", "  Rome  ", ""]
    assert [short_answer(one) for one in said] == ["GmbH", "Rome", "Rome", ""]
