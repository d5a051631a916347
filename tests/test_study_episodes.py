"""The study of whole episodes: data to recordings, episodes under every policy, the report."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner

from cacheslide_agents.bench import recordings, run_study
from cacheslide_agents.bench.datasets import (
    Dialogue,
    HotpotQuestion,
    ReflexionRun,
    Trial,
    Utterance,
    trajectories,
)
from cacheslide_agents.bench.episode_report import (
    episodes_markdown,
    episodes_table,
    plot_episodes,
)
from cacheslide_agents.bench.episodes import AGENTS, MODES
from cacheslide_agents.bench.studies.episodes import EpisodeRow, points
from cacheslide_agents.cli.commands import app
from cacheslide_agents.errors import DataError

QUESTION = HotpotQuestion("q0", "Which river flows past mill 0?", "the Brook 0", ())


def call(name: str, **arguments: str) -> str:
    return json.dumps({"name": name, "arguments": arguments})


def note(content: str) -> str:
    return call("core_memory_append", block="human", content=content)


@pytest.fixture
def data(support: Callable[[str], ModuleType], tmp_path: Path) -> Path:
    """The tiny data folder, with a chain-of-thought run and a dialogue of many exchanges."""
    tiny = support("tiny_data")
    folder: Path = tiny.write_tiny_data(tmp_path / "data")
    trials = [
        {"trial": 1, "reflections": [], "trajectory": "Thought: a mill\nAction: Finish[Mill]"},
        {"trial": 2, "reflections": ["Look."], "trajectory": "Thought: b\nAction: Finish[Brook]"},
    ]
    run = {"id": "q0:cot", "hotpotqa_id": "q0", "trials": trials}
    (folder / "hotpotqa" / "reflexion_dev.jsonl").write_text(json.dumps(run) + "\n")
    turns = [
        {"speaker": f"Speaker {1 + turn % 2}", "text": f"Line {turn}."}
        | ({"fact": "I sail."} if turn == 8 else {})
        for turn in range(16)
    ]
    asked = [{"question": "What do I do?", "answer": "sail"}]
    talk = {"id": "talk", "sessions": [turns[:2], turns], "questions": asked}
    (folder / "msc" / "dev.jsonl").write_text(json.dumps(talk) + "\n")
    return folder


def test_trials_become_thoughts_answers_and_reflections() -> None:
    trials = (
        Trial(1, (), "Thought: It is\na mill.\nAction: Finish[Mill]\nObservation: INCORRECT"),
        Trial(2, ("Look.",), "Thought: hm\nAction: Finish[Rhine]"),
        Trial(3, ("Look.", "Ask.", "Wait."), "Thought: so\nAction: Finish[Brook]"),
    )
    found = recordings.reflexion_recording(ReflexionRun("r", "q0", trials), QUESTION)
    assert found is not None
    assert found.trials == 3
    assert found.answers == (
        *("It is\na mill.", "Finish[Mill]", "Look."),
        *("hm", "Finish[Rhine]", "Ask. Wait."),
        *("so", None),
    )


def test_runs_in_rounds_and_single_trials_make_no_recording() -> None:
    rounds = tuple(Trial(n, (), "Thought 1: look") for n in (1, 2))
    single = (Trial(1, (), "Thought: look\nAction: Finish[x]"),)
    for trials in (rounds, single):
        assert recordings.reflexion_recording(ReflexionRun("r", "q", trials), QUESTION) is None


def test_shipped_question_is_answered_wrongly_before_the_model_may_try() -> None:
    found = recordings.demo_recording(QUESTION, ["Look."], ["Mill"])
    assert found.answers == ("The passages lead to Mill.", "Mill", "Look.", None, None)
    assert found.trials == 2


def test_facts_of_a_dialogue_become_memory_writes() -> None:
    def turn(speaker: int, text: str, fact: str | None = None) -> Utterance:
        return Utterance(f"Speaker {speaker}", text, fact)

    earlier = (turn(1, "Hi.", "I bake."), turn(2, "Hello."))
    last = (
        *(turn(2, "Back!"), turn(1, "Seen.", "I row."), turn(2, "Good.")),
        *(turn(1, "Now.", "I sail."), turn(2, "Where?", "I ask.")),
    )
    dialogue = Dialogue("d", (earlier, last), (("I rest.",), ()), (("What?", "sail"),))
    found = recordings.dialogue_recording(dialogue, exchanges=1)
    assert found is not None
    assert found.human.splitlines() == [
        "Speaker 1: I rest.",
        "Speaker 1: I bake.",
        "Speaker 1: I row.",
    ]
    assert found.archive == ("Speaker 1: Hi.", "Speaker 2: Hello.")
    assert found.seen == (("Seen.", "Good."),)
    assert (found.says, found.gold) == (("Now.", "What?"), "sail")
    assert found.answers == (
        *(note("Speaker 1: I sail."), note("Speaker 2: I ask.")),
        *(call("send_message", message="Where?"), None, None, None, None),
    )
    assert recordings.dialogue_recording(dialogue, exchanges=3) is None


def test_trajectory_is_cut_to_its_first_steps(data: Path) -> None:
    long, brief = trajectories(data / "swe_agent" / "dev.jsonl")
    found = recordings.command_recording(long, 6, 50)
    assert found is not None
    assert found.answers[0] == 'Step 1.\n\nbash {"command": "run 1"}'
    assert (len(found.answers), len(found.observations)) == (6, 6)
    assert "characters left out" in found.observations[5]
    assert recordings.command_recording(brief, 6, 50) is None


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("agent", AGENTS)
def test_every_agent_plays_in_every_mode(
    agent: str, mode: str, data: Path, support: Callable[[str], ModuleType]
) -> None:
    support("fake_backend")
    backend = support("hinting_backend").HintingBackend([call("send_message", message="sail")])
    episode = next(AGENTS[agent](data, mode))
    score = episode.play(_model(backend), {"configurable": {"thread_id": "t"}})
    expected = {"reflexion": 0.0, "memgpt": 1.0, "swe_agent": 0.0 if mode == "live" else None}
    assert score == expected[agent]
    calls = {
        "reflexion": {"live": 8, "replay": 5},
        "memgpt": {"live": 7, "replay": 8},
        "swe_agent": {"live": 12, "replay": 12},
    }
    assert len(backend.requests) == calls[agent][mode]
    assert {request.session for request in backend.requests} == {"t"}


def _model(backend: Any) -> Any:
    from langchain_cacheslide import ChatCacheSlide

    return ChatCacheSlide(backend=backend)


def test_study_plays_each_episode_under_every_policy_in_turn(
    data: Path, tmp_path: Path, support: Callable[[str], ModuleType]
) -> None:
    support("fake_backend")
    backend = support("hinting_backend").HintingBackend(["Mill"], reused=5)
    out, done = tmp_path / "episodes.json", []
    found = run_study(
        "episodes",
        data=data,
        backend=backend,
        out=out,
        agents=["reflexion"],
        policies=("recompute", "cacheslide"),
        progress=lambda *step: done.append(step),
    )
    assert json.loads(out.read_text()) == found
    order = [(row["mode"], row["policy"]) for row in found["rows"]]
    assert order == [
        *(("live", "recompute"), ("live", "cacheslide")),
        *(("replay", "cacheslide"), ("replay", "recompute")),
    ]
    namespaces = [request.namespace for request in backend.requests]
    assert len(set(namespaces)) == 5  # four playings and the one that warms up
    live = found["rows"][1]
    assert (live["calls"], live["score"], live["reused_tokens"]) == (8, 0.0, 40)
    assert live["wall_s"] >= live["llm_s"] > 0
    assert done[-1] == (2, 2, "reflexion, replay: q0:cot")


def test_interrupted_study_keeps_the_episodes_that_every_policy_has_played(
    data: Path, tmp_path: Path, support: Callable[[str], ModuleType]
) -> None:
    support("fake_backend")
    backend = support("hinting_backend").HintingBackend(["Mill"])
    options: dict[str, Any] = {
        "data": data,
        "backend": backend,
        "out": tmp_path / "episodes.json",
        "agents": ["reflexion"],
        "policies": ("recompute", "cacheslide"),
    }
    whole = run_study("episodes", **options)
    broken = {**whole, "rows": whole["rows"][:-1]}
    options["out"].write_text(json.dumps(broken))
    backend.requests.clear()
    again = run_study("episodes", resume=True, **options)
    assert again["rows"][:2] == whole["rows"][:2]
    assert [row["mode"] for row in again["rows"]] == ["live", "live", "replay", "replay"]
    backend.requests.clear()
    assert run_study("episodes", resume=True, **options) == again
    assert backend.requests == []


def row(policy: str, id: str, seconds: float, score: float | None = None) -> EpisodeRow:
    times = {"wall_s": 2 * seconds, "llm_s": seconds, "ttft_s": seconds / 2}
    tokens = {"prompt_tokens": 100, "reused_tokens": 25, "fallbacks": 0}
    return EpisodeRow("memgpt", "live", id, policy, **times, calls=4, score=score, **tokens)  # type: ignore[arg-type]


def test_ratios_are_medians_of_pairs_and_scores_are_means() -> None:
    rows = [row("recompute", name, 8.0, 1.0) for name in "abc"]
    rows += [row("cacheslide", "b", 2.0, 0.5), row("cacheslide", "a", 4.0, 1.0)]
    rows += [row("cacheslide", "c", 1.0, 0.0)]
    dense, reuse = points(rows)
    assert (dense["wall_speedup"], dense["llm_s"], dense["score"]) == (1.0, 8.0, 1.0)
    assert (reuse["wall_speedup"], reuse["llm_speedup"], reuse["ttft_speedup"]) == (4.0, 4.0, 4.0)
    assert (reuse["score"], reuse["reused"], reuse["episodes"]) == (0.5, 0.25, 3)


def test_episode_that_dense_has_not_played_yet_counts_in_no_ratio() -> None:
    (only,) = points([row("cacheslide", "a", 1.0)])
    assert (only["wall_speedup"], only["score"]) == (None, None)


def test_report_has_a_row_for_each_point_and_a_figure(tmp_path: Path) -> None:
    found = points([row("recompute", "a", 8.0), row("cacheslide", "a", 2.0)])
    study = {"study": "episodes", "model": "m", "points": found}
    page = episodes_markdown(study).splitlines()
    assert page[-1].startswith("| memgpt | live | cacheslide | 1 | 4.0 | 4.00 | 2.00 | 1.00 | 4.00")
    assert episodes_table(study).row_count == 2
    plot_episodes(study, tmp_path / "episodes.png")
    assert (tmp_path / "episodes.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(DataError, match="--study episodes"):
        episodes_table({"study": "frontier", "points": [1]})


def test_command_line_reports_a_study_of_episodes(tmp_path: Path) -> None:
    found = points([row("recompute", "a", 8.0), row("cacheslide", "a", 2.0)])
    study, figure = tmp_path / "episodes.json", tmp_path / "episodes.svg"
    study.write_text(json.dumps({"study": "episodes", "model": "m", "points": found}))
    page, as_json, drawn, table = (
        CliRunner().invoke(app, ["report", str(study), *options])
        for options in (["--page"], ["--json"], ["--plot", str(figure)], [])
    )
    assert page.stdout.splitlines()[-1].startswith("| memgpt | live | cacheslide | 1 |")
    assert json.loads(as_json.stdout) == found
    assert drawn.exit_code == 0
    assert figure.read_text().startswith("<?xml")
    assert "whole episodes, m" in table.stdout


@pytest.mark.parametrize("options", [[], ["--page"], ["--json"], ["--plot", "figure.png"]])
@pytest.mark.parametrize("points", [None, [], 3, [1], [{"agent": "memgpt"}]])
def test_damaged_study_is_one_clear_line(tmp_path: Path, points: Any, options: list[str]) -> None:
    shown_as_it_is = points == [{"agent": "memgpt"}] and options[:1] != ["--plot"]
    for kind in ("episodes",) if shown_as_it_is else ("episodes", "frontier"):
        study = tmp_path / f"{kind}.json"
        study.write_text(json.dumps({"study": kind, "points": points}))
        told = CliRunner().invoke(app, ["report", str(study), *options])
        assert (told.exit_code, told.stdout) == (2, "")
        assert told.stderr.startswith("error: ")


@pytest.mark.parametrize("options", [[], ["--page"], ["--json"]])
def test_run_without_rows_is_one_clear_line(tmp_path: Path, options: list[str]) -> None:
    run = json.loads((Path(__file__).parents[1] / "docs/results/append.json").read_text())
    (tmp_path / "run.json").write_text(json.dumps({**run, "rows": []}))
    told = CliRunner().invoke(app, ["report", str(tmp_path / "run.json"), *options])
    assert (told.exit_code, told.stdout) == (2, "")
    assert "has no row" in told.stderr


@pytest.mark.parametrize("wrong", [{"agents": ["pilot"]}, {"modes": ["dreamt"]}])
def test_unknown_names_are_data_errors(
    wrong: Any, data: Path, support: Callable[[str], ModuleType]
) -> None:
    backend = support("fake_backend").FakeBackend()
    with pytest.raises(DataError, match=r"(pilot|dreamt).*known"):
        run_study("episodes", data=data, backend=backend, **wrong)


def test_every_recording_of_the_real_data_has_as_many_answers_as_its_agent_asks(
    data_dir: Path,
) -> None:
    for mode in MODES:
        for episodes in AGENTS.values():
            assert next(episodes(data_dir, mode)).id
