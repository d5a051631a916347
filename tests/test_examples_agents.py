"""The agents' examples, from the command line to the last line, with scripted models."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from runpy import run_path
from types import ModuleType
from typing import Any

import pytest

from langchain_cacheslide import BackendLoader

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
AGENTS = ("reflexion_agent", "memgpt_agent", "swe_agent")


@pytest.fixture
def play(
    support: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Callable[..., tuple[str, Any]]:
    """Runs an example as `python examples/NAME.py ARGUMENT...` does, with this answer to all."""
    support("fake_backend")
    backend_class = support("hinting_backend").HintingBackend
    monkeypatch.setenv("COLUMNS", "300")

    def run(name: str, *arguments: str, answer: str = "Nothing.") -> tuple[str, Any]:
        backend = backend_class([answer], reused=9)
        monkeypatch.setattr(BackendLoader, "get", lambda *_: backend)
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        with pytest.raises(SystemExit) as end:
            run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        assert end.value.code in (0, None)
        return capsys.readouterr().out, backend

    return run


def test_reflexion_lets_the_model_try_after_the_recorded_attempts(play: Any) -> None:
    shown, backend = play("reflexion_agent", "--replay", answer="Answer: M. Night Shyamalan")
    assert "trial 1: F1 0.00  Jighansa" in shown
    assert "trial 3: F1 1.00  M. Night Shyamalan" in shown
    assert "8 calls in" in shown
    assert len(backend.requests) == 8


def test_reflexion_ends_with_the_first_right_answer(play: Any) -> None:
    shown, backend = play("reflexion_agent", answer="M. Night Shyamalan")
    assert "trial 1: F1 1.00" in shown
    assert len(backend.requests) == 2
    assert "9 of" in shown


def test_replayed_companion_keeps_its_memory(play: Any) -> None:
    shown, backend = play("memgpt_agent", "--replay")
    assert "She lives in Bodo, on the harbour, and repairs boats." in shown
    assert "Tromso and repairs" not in shown.rpartition("what it remembers of you")[2]
    assert "Havsule was the one you learned on" in shown
    assert "Returned: user: My grandfather built the first boat" in backend.prompts()[7]
    assert len(backend.requests) == 14


def test_companion_talks_with_the_user(play: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    said = iter(["I sail.", ""])
    monkeypatch.setattr("rich.prompt.Prompt.ask", lambda *_, **__: next(said))
    reply = json.dumps({"name": "send_message", "arguments": {"message": "Where to?"}})
    shown, backend = play("memgpt_agent", "--talk", answer=reply)
    assert "Where to?" in shown
    assert backend.requests[0].grammar is not None


def test_replayed_programmer_mends_the_repository(play: Any) -> None:
    shown, backend = play("swe_agent", "--replay")
    assert "The repository's test passes." in shown
    assert len(backend.requests) == 10


def test_programmer_on_its_own_is_told_that_the_test_fails(play: Any) -> None:
    shown, backend = play("swe_agent", "--steps", "2")
    assert "The repository's test still fails." in shown
    assert len(backend.requests) == 2


@pytest.mark.parametrize("name", AGENTS)
def test_reuse_can_be_switched_off(play: Any, name: str) -> None:
    _, backend = play(name, "--no-reuse", "--replay")
    assert {request.policy.name for request in backend.requests} == {"recompute"}


@pytest.mark.parametrize("name", AGENTS)
def test_wrong_input_is_one_clear_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--model", "/no/such/folder"])
    with pytest.raises(SystemExit, match=r"^error: .*/no/such/folder"):
        run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
