"""`cacheslide calibrate` with names from strangers, and with folders that cannot be written."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from cacheslide_agents.chunks import EncodedPrompt
from cacheslide_agents.cli.commands import app
from cacheslide_agents.errors import DataError
from cacheslide_agents.position.profile import CanonicalEntry, Profile
from cacheslide_agents.training.output import claimed


class Calibrating:
    """A backend that learns the same of every task; `asked` counts prompts."""

    profiled = ()

    def __init__(self, fake: Any) -> None:
        self._fake, self.asked = fake, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fake, name)

    def add_profile(self, profile: Profile) -> None:
        raise AssertionError("nobody asked for it")

    def calibrate(
        self, prompts: Iterable[EncodedPrompt], seen: Callable[[int], None] | None = None
    ) -> Profile:
        asked = list(prompts)
        self.asked += len(asked)
        if seen is not None:
            seen(len(asked))
        return profile(asked[0].task)


def profile(task: str) -> Profile:
    mass = torch.ones(1, 1, dtype=torch.int16)
    entry = CanonicalEntry("chunk", "update", 1, 1, mass, torch.ones(1, 1))
    return Profile(task, "digest", 16, (entry,))


@pytest.fixture
def backend(support: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> Calibrating:
    fake = Calibrating(support("fake_backend").FakeBackend())
    monkeypatch.setattr("cacheslide_agents.cli.engine.load_backend", lambda *_, **__: fake)
    return fake


@pytest.fixture
def calibrate(tmp_path: Path) -> Callable[..., Result]:
    def run(*tasks: str, out: Path) -> Result:
        trace = tmp_path / "trace.jsonl"
        lines = ({"prompt_ids": [1, 2, 3], "task": task} for task in tasks)
        trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return CliRunner().invoke(app, ["calibrate", str(trace), "--out", str(out)])

    return run


@pytest.mark.parametrize("task", ["{x}", "[/x]", "[bold]", ":smile:"])
def test_the_name_of_a_task_is_shown_as_it_is(
    backend: Calibrating,
    calibrate: Callable[..., Result],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    task: str,
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # bars are drawn on a terminal only
    result = calibrate(task, out=tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert task in result.stderr and task in result.stdout
    (path,) = (tmp_path / "out").glob("*.safetensors")
    assert Profile.read(path).task == task


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("x" * 300, "cannot be written"),
        ("\ud800", r"the task '\ud800' names its profile's file, but is not Unicode text: lone"),
    ],
    ids=["long", "surrogate"],
)
def test_a_task_that_can_name_no_file_is_refused_before_any_prompt_runs(
    backend: Calibrating, calibrate: Callable[..., Result], tmp_path: Path, task: str, message: str
) -> None:
    result = calibrate("good", task, out=tmp_path / "out")
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert backend.asked == 0


def test_a_folder_that_cannot_be_written_is_refused_before_any_prompt_runs(
    backend: Calibrating, calibrate: Callable[..., Result], tmp_path: Path
) -> None:
    file, taken, busy = (tmp_path / name for name in ("file", "taken", "busy"))
    file.write_text("")
    (taken / "t.ccpe.safetensors").mkdir(parents=True)
    results = [calibrate("t", out=file / "out"), calibrate("t", out=taken)]
    with claimed(busy):
        results.append(calibrate("t", out=busy))
    for result, message in zip(
        results, ["cannot be written", "a folder has this name", "another run"], strict=True
    ):
        assert (result.exit_code, result.stdout) == (2, "")
        assert message in result.stderr
    assert backend.asked == 0


def test_a_profile_that_finds_the_disk_full_leaves_the_old_one(
    tmp_path: Path, support: Callable[[str], ModuleType]
) -> None:
    path = profile("t").save(tmp_path)
    before = path.read_bytes()
    full = support("full_disk").full_after(100)
    with full, pytest.raises(DataError, match=r"cannot be written .*free some space"):
        profile("t").save(tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
    assert path.read_bytes() == before


def test_a_profile_of_a_task_that_is_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not Unicode text"):
        profile("\ud800").save(tmp_path)


def test_a_profile_with_more_positions_than_a_number_holds_is_read_without_a_crash(
    tmp_path: Path,
) -> None:
    path = Profile("t", "digest", 10**30, profile("t").entries).save(tmp_path)
    assert Profile.read(path).npos == 10**30
