"""The SWE-style loop: scripted answers, a real shell, a real repository."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from langchain_core.runnables import RunnableConfig

from cacheslide_agents.bench import small_repository
from cacheslide_agents.errors import DataError, RequestError
from langchain_cacheslide import ChatCacheSlide
from langchain_cacheslide.agents import Replayed, Shell, swe_graph
from langchain_cacheslide.agents.shell import Result
from langchain_cacheslide.agents.swe import NO_COMMAND, command_in, window


class Recorder:
    """A shell that only writes down what it is asked."""

    def __init__(self) -> None:
        self.commands: list[str] = []

    def run(self, command: str) -> Result:
        self.commands.append(command)
        return Result(0, f"output of {command}")


def run_block(command: str) -> str:
    return f"Next.\n```bash\n{command}\n```"


@pytest.fixture
def scripted(support: Callable[[str], ModuleType]) -> Callable[..., ChatCacheSlide]:
    support("fake_backend")
    backend = support("hinting_backend").HintingBackend
    return lambda *answers: ChatCacheSlide(backend=backend(answers))


def test_recorded_answers_mend_the_repository_and_its_tests_pass(
    scripted: Any, tmp_path: Path
) -> None:
    shell = Shell(small_repository.write_repository(tmp_path / "basket"))
    assert shell.run(small_repository.TEST).code != 0
    model = scripted(*small_repository.MENDED)
    done = swe_graph(model, shell, test=small_repository.TEST).invoke(
        {"issue": small_repository.ISSUE}
    )
    assert (done["submitted"], done["passed"]) == (True, True)
    assert "OK" in done["report"]
    assert "price = price * (100" in (shell.folder / "basket.py").read_text()
    assert len(model.backend.requests) == len(small_repository.MENDED)


def test_unmended_repository_fails_its_test(scripted: Any, tmp_path: Path) -> None:
    shell = Shell(small_repository.write_repository(tmp_path))
    graph = swe_graph(scripted("submit"), shell, test=small_repository.TEST)
    done = graph.invoke({"issue": small_repository.ISSUE})
    assert (done["submitted"], done["passed"]) == (True, False)
    assert "9000 != 7200" in done["report"]


def test_older_observations_are_elided_and_their_chunks_keep_their_ids(scripted: Any) -> None:
    answers = [run_block(f"step {n}") for n in range(1, 5)]
    model = scripted(*answers, "submit")
    swe_graph(model, Recorder(), keep_observations=2).invoke({"issue": "Sums are wrong."})
    last = model.backend.prompts()[-1]
    shown = [n for n in range(1, 5) if f"output of step {n}" in last]
    assert shown == [3, 4]
    assert last.count("Old output omitted") == 2
    ids = [[span.id for span in request.spans] for request in model.backend.requests]
    assert ids[-1][:-2] == ["system", "issue", *(f"step-{n}" for n in range(1, 9))]
    assert ids[-2][:-2] == ids[-1][: len(ids[-2]) - 2]
    assert {request.task for request in model.backend.requests} == {"swe_agent"}


def test_steps_are_bounded_and_an_answer_without_command_is_told_so(scripted: Any) -> None:
    shell = Recorder()
    done = swe_graph(scripted("I think."), shell, steps=2).invoke({"issue": "x"})
    assert [entry["text"] for entry in done["history"]] == ["I think.", NO_COMMAND] * 2
    assert shell.commands == []
    assert "submitted" not in done
    with pytest.raises(RequestError, match="steps=0"):
        swe_graph(scripted("x"), shell, steps=0)


def test_session_is_pinned_and_refreshed_while_a_command_runs(scripted: Any) -> None:
    model = scripted(run_block("ls"), "submit")
    thread: RunnableConfig = {"configurable": {"thread_id": "t"}}
    swe_graph(model, Recorder()).invoke({"issue": "x"}, thread)
    asked = [("generate", "t"), ("pin", "t"), ("refresh", "t"), ("generate", "t")]
    assert model.backend.events == [*asked, ("release", "t")]


def test_episode_that_breaks_off_leaves_nothing_pinned(scripted: Any) -> None:
    class Broken:
        def run(self, command: str) -> Result:
            raise ConnectionError

    thread: RunnableConfig = {"configurable": {"thread_id": "t"}}
    look = run_block("ls")
    model = scripted(look)
    with pytest.raises(ConnectionError):
        swe_graph(model, Broken()).invoke({"issue": "x"}, thread)
    assert model.backend.events[-3:] == [("pin", "t"), ("refresh", "t"), ("release", "t")]
    model = scripted(look)
    with pytest.raises(DataError, match="recording ends"):
        swe_graph(Replayed(model, [look]), Recorder()).invoke({"issue": "x"}, thread)
    assert model.backend.events[-3:] == [("pin", "t"), ("refresh", "t"), ("release", "t")]


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("Look.\n```bash\nls -l\n```", "ls -l"),
        ("```\nls\n```", "ls"),
        ("```c++\r\nls\r\n```", "ls"),
        ("```ls -l```", "ls -l"),
        ("```sh\na\n```\nthen\n```sh\nb && c\n```", "b && c"),
        ("```bash\ncat <<X\n1\nX\n```", "cat <<X\n1\nX"),
        ("All done.\n submit \n", "submit"),
        ("I would submit now", None),
        ("```bash\n\n```", None),
        ("", None),
    ],
)
def test_command_of_a_message_is_found(text: str, command: str | None) -> None:
    assert command_in(text) == command


def entries(*texts: str) -> list[dict[str, str]]:
    roles = ["assistant" if number % 2 == 0 else "user" for number in range(len(texts))]
    return [{"role": role, "text": text} for role, text in zip(roles, texts, strict=True)]


def test_window_drops_the_oldest_exchanges_and_counts_elided_output_as_a_note() -> None:
    history = entries("a" * 10, "o" * 1000, "b" * 10, "o" * 20, "c" * 10, "o" * 20)
    assert window(history, 2, 100, len) == history  # the long output is elided: 10 for its note
    assert window(history, 3, 100, len) == history[2:]
    assert window(history, 3, 1, len) == history[4:]
    assert window([], 3, 100, len) == []
