"""A whole run on scripted policies: rows kept as they come, resumed where they stopped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from cacheslide_agents.backend import GenerationChunk
from cacheslide_agents.bench import STUDIES, read_results, run_study, run_task, studies
from cacheslide_agents.bench.runner import longest_updates
from cacheslide_agents.bench.studies.variants import BOUNDARIES
from cacheslide_agents.bench.workloads import Turn
from cacheslide_agents.chunks import Chunk, ChunkedPrompt, Message, Role
from cacheslide_agents.errors import BackendError, DataError, RequestError
from cacheslide_agents.policies import POLICY_NAMES, PromptCache

if TYPE_CHECKING:
    from tests.support.scripted_backend import ScriptedBackend

TWO = ("prefix", "cacheslide")


@pytest.fixture
def data(support: Callable[[str], ModuleType], tmp_path: Path) -> Path:
    folder: Path = support("tiny_data").write_tiny_data(tmp_path / "data")
    return folder


@pytest.fixture
def backend(support: Callable[[str], ModuleType]) -> ScriptedBackend:
    script = support("scripted_backend").Script
    made: ScriptedBackend = support("scripted_backend").ScriptedBackend(
        {
            "recompute": script(outcome="cold"),
            "cacheslide": script(reused=100, probabilities=(0.6, 0.4)),
            "epic": script(reused=50, probabilities=(0.7, 0.3)),
        },
        tokenizer=support("fake_backend").byte_tokenizer(),
    )
    return made


def test_a_run_measures_every_turn_under_every_policy_and_the_reference(
    backend: ScriptedBackend, data: Path
) -> None:
    results = run_task("reflexion", data=data, backend=backend, policies=TWO)
    assert {(row.id, row.turn) for row in results.rows} == {("q0:react", 2), ("q0:react", 4)}
    assert list(results.summary) == ["recompute", "prefix", "cacheslide"]
    assert (results.task, results.model, results.backend) == ("reflexion", "scripted", "torch")
    assert results.versions.keys() >= {"python", "torch", "transformers", "cacheslide-agents"}
    assert results.threads >= 1


def test_a_run_without_a_list_measures_every_policy(backend: ScriptedBackend, data: Path) -> None:
    results = run_task("reflexion", data=data, backend=backend, limit=1)
    assert tuple(results.summary) == POLICY_NAMES


def test_the_file_is_complete_after_every_row(
    backend: ScriptedBackend, data: Path, tmp_path: Path
) -> None:
    out, seen = tmp_path / "results.json", []

    def progress(done: int, total: int, label: str) -> None:
        seen.append((done, total, len(read_results(out).rows)))

    options: dict[str, Any] = {"policies": TWO, "out": out, "progress": progress}
    results = run_task("reflexion", data=data, backend=backend, **options)
    assert seen == [(1, 2, 3), (2, 2, 6)]
    assert read_results(out) == results


def test_every_policy_answers_once_before_the_first_row_is_timed(
    backend: ScriptedBackend, data: Path
) -> None:
    run_task("reflexion", data=data, backend=backend, policies=TWO, limit=2)
    order = ["recompute", "prefix", "cacheslide"]
    assert backend.asked("generate") == [*order, *order, "prefix", "cacheslide", "recompute"]


def test_a_resumed_run_measures_only_what_is_missing(
    backend: ScriptedBackend, data: Path, tmp_path: Path
) -> None:
    out = tmp_path / "results.json"
    options: dict[str, Any] = {"data": data, "backend": backend, "policies": TWO, "out": out}
    first = run_task("reflexion", limit=1, **options)
    backend.calls.clear()
    both = run_task("reflexion", resume=True, **options)
    assert backend.asked("warm") == ["prefix"]
    assert both.rows[:3] == first.rows
    assert {row.turn for row in both.rows[3:]} == {2, 4} - {first.rows[0].turn}


def test_a_turn_that_lacks_a_policy_is_measured_again(
    backend: ScriptedBackend, data: Path, tmp_path: Path
) -> None:
    out = tmp_path / "results.json"
    options: dict[str, Any] = {"data": data, "backend": backend, "out": out}
    run_task("reflexion", policies=("prefix",), **options)
    results = run_task("reflexion", policies=TWO, resume=True, **options)
    assert [row.policy for row in results.rows] == ["recompute", "prefix", "cacheslide"] * 2


def test_a_run_of_another_model_is_not_resumed(
    backend: ScriptedBackend, data: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"data": data, "backend": backend, "out": tmp_path / "r.json"}
    run_task("reflexion", policies=(), **options)
    backend.model_id = "other"
    with pytest.raises(DataError, match="the file's model is 'scripted', not 'other'"):
        run_task("reflexion", policies=(), resume=True, **options)


def test_an_error_of_the_backend_ends_the_run_and_leaves_the_file(
    backend: ScriptedBackend, data: Path, tmp_path: Path
) -> None:
    out = tmp_path / "results.json"

    def stop(done: int, total: int, label: str) -> None:
        backend.answer = ""
        backend.generate = lambda request: (_ for _ in list[GenerationChunk]())  # type: ignore[method-assign]

    with pytest.raises(BackendError):
        run_task("reflexion", data=data, backend=backend, policies=(), out=out, progress=stop)
    assert len(read_results(out).rows) == 1


def test_an_unknown_policy_is_refused_before_any_work(backend: ScriptedBackend, data: Path) -> None:
    with pytest.raises(RequestError, match="no policy is named 'magic'"):
        run_task("reflexion", data=data, backend=backend, policies=("magic",))
    assert not backend.calls


def test_prompt_cache_gets_slots_as_long_as_the_longest_update(
    backend: ScriptedBackend,
) -> None:
    def prompt(memory: str, question: str) -> ChunkedPrompt:
        chunks = (Chunk("s", "system", Role.REUSE), Chunk("m", memory), Chunk("q", question))
        return ChunkedPrompt((Message("user", chunks),))

    turns = [
        Turn("a", 1, "t", prompt("12345", "?"), prompt("1234567", "??")),
        Turn("b", 1, "t", prompt("123456789", ""), prompt("1", "???")),
    ]
    assert longest_updates(turns, backend.encode) == {"m": 9, "q": 3}


def test_a_run_with_prompt_cache_takes_its_slots_from_all_turns(
    backend: ScriptedBackend, data: Path
) -> None:
    options: dict[str, Any] = {"data": data, "backend": backend, "policies": ("prompt_cache",)}
    slots = []
    for limit in (1, None):
        backend.calls.clear()
        run_task("reflexion", limit=limit, **options)
        asked = [request.policy for _, request in backend.calls]
        slots.append({policy.slots for policy in asked if isinstance(policy, PromptCache)})
    assert slots[0] == slots[1]
    (found,) = slots[0]
    assert dict(found)["reflections"] > len("Look twice.") + len("Ask.")


def test_the_frontier_study_gives_one_point_for_each_task_and_variant(
    backend: ScriptedBackend, data: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"tasks": ("reflexion",), "families": ("epic",), "limit": 2}
    out = tmp_path / "frontier.json"
    study = run_study("frontier", data=data, backend=backend, out=out, **options)
    assert (study["schema"], study["study"], study["model"]) == (1, "frontier", "scripted")
    assert len(study["points"]) == 2 * len(BOUNDARIES)
    assert {point["policy"] for point in study["points"]} == {"epic", "epic_context"}
    point = study["points"][0]
    assert set(point) == {
        *("task", "policy", "selector", "fraction", "compute_fraction", "kl_mean", "kl_p95"),
        *("top1", "ttft_speedup_vs_recompute"),
    }
    assert (point["task"], point["selector"]) == ("reflexion", "boundary0")
    assert point["kl_mean"] == point["kl_p95"] > 0.08
    assert set(backend.asked("warm")) == {"epic", "epic_context"}


def test_the_studies_are_the_modules_that_run_one() -> None:
    """They are imported by name, so that nothing else would miss one."""
    modules = Path(studies.__file__).parent.glob("*.py")
    assert {path.stem for path in modules if "\ndef run(" in path.read_text()} == set(STUDIES)
    assert all(studies.takes(name, "save") for name in STUDIES)


def test_an_unknown_study_or_family_is_a_data_error(backend: ScriptedBackend, data: Path) -> None:
    with pytest.raises(DataError, match="no study named 'x'; known: answers, converted, "):
        run_study("x", data=data, backend=backend)
    with pytest.raises(DataError, match="no family named 'x'; known: default"):
        run_study("frontier", data=data, backend=backend, families=("x",))


def test_the_oracle_needs_a_backend_whose_store_can_be_read(
    backend: ScriptedBackend, data: Path
) -> None:
    options: dict[str, Any] = {"tasks": ("reflexion",), "families": ("oracle",)}
    with pytest.raises(BackendError, match="must read stored keys"):
        run_study("frontier", data=data, backend=backend, **options)
