"""`cacheslide check` and `demo` on a backend without a model: what they judge and say."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner, Result

from cacheslide_agents.backend import Backend
from cacheslide_agents.cli.commands import app

if TYPE_CHECKING:
    from tests.support.fake_backend import FakeBackend


@pytest.fixture
def backend(support: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> FakeBackend:
    """What every command loads."""
    fake: FakeBackend = support("fake_backend").FakeBackend(reused=7)

    def load(name: str, **options: Any) -> Backend:
        fake.loaded_with = (name, options)
        return fake

    monkeypatch.setattr("cacheslide_agents.cli.engine.load_backend", load)
    return fake


def run(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, arguments, input=stdin)


def test_check_fails_loudly_when_nothing_is_reused(backend: FakeBackend) -> None:
    backend.reused = 0
    result = run("check")
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert len(lines) == 3
    assert all(line.startswith("FAIL") for line in lines)
    assert "reuse did not happen: cold" in lines[0]
    assert backend.closed


def test_check_fails_when_what_was_reused_had_not_moved(backend: FakeBackend) -> None:
    result = run("check", "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert found["holds"] is False
    assert [one["holds"] for one in found["findings"]] == [True, True, False]
    assert "no reused chunk had moved" in found["findings"][2]["detail"]


def test_check_fails_when_the_distributions_differ(
    backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = backend.score

    def biased(request: Any, continuation_ids: Any) -> Any:
        scores = honest(request, continuation_ids)
        if request.policy.name != "recompute":
            scores.logprobs[:, 0] += 5.0
        return scores

    monkeypatch.setattr(backend, "score", biased)
    result = run("check")
    assert result.exit_code == 1
    assert result.stdout.count("KL to dense is") == 3


def test_demo_compares_both_arms_and_alternates_which_goes_first(backend: FakeBackend) -> None:
    result = run("demo", "--max-tokens", "4", "--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert found["answers_equal"] is True
    assert [trial["trial"] for trial in found["trials"]] == [1, 2, 3]
    assert [trial["ttft_speedup"] for trial in found["trials"]] == [1.0, 1.0, 1.0]
    assert found["trials"][0]["dense"]["receipt"]["policy"] == "recompute"
    dense = [bool(request.policy) for request in backend.requests]
    assert dense == [True, False, True, True, False, False, True]
    assert len({request.namespace for request in backend.requests}) == 1


def test_demo_says_plainly_when_answers_differ(
    backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = backend._pieces

    def drifting(request: Any) -> Any:
        pieces = list(honest(request))
        return pieces if request.policy else pieces[1:]

    monkeypatch.setattr(backend, "_pieces", drifting)
    result = run("demo", "--max-tokens", "4")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1] == "The answers are NOT all equal."
    assert "Answer without reuse:" in result.stdout
    assert "reflections" in result.stdout
