"""The scripts' own logic, run with a stand-in for Python that only writes down what it is asked."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SYSTEM_PATH = "/usr/bin:/bin"
WITH_VLLM, WITHOUT_VLLM = "Linux x86_64", "Plan9 mips"

# `-c` is the question whether it can make environments, `-m venv DIR` makes one, `-m pip` installs.
STAND_IN = r"""#!/usr/bin/env bash
echo "$*" >>"$STAND_IN_LOG"
case "$1 ${2:-}" in
"-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && cp "$0" "$3/bin/cacheslide" ;;
"-m pip") if [ "$3" = install ]; then
    case "$*" in *"${BROKEN_PINS:-no pins}"*) exit 1 ;; esac
    if [ -n "${KILL_PIP:-}" ]; then kill -9 $$; fi
    sleep "${PIP_SECONDS:-0}"
    exit "${PIP_STATUS:-0}"
fi ;;
"-m ${BROKEN:-}") exit 1 ;;
esac
"""


@dataclass(frozen=True)
class Checkout:
    """A copy of the scripts in a folder with a space in its name, and a log of the stand-in."""

    root: Path
    cwd: Path
    log: Path

    def run(
        self, script: str, *arguments: str, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        self.log.write_text("")
        python = self.root.parent / "stand-in"
        path = f"{self.root.parent / 'bin'}:{SYSTEM_PATH}"
        settings = {"PATH": path, "PYTHON": str(python), "STAND_IN_LOG": str(self.log)}
        return subprocess.run(
            ["bash", str(self.root / "scripts" / script), *arguments],
            cwd=self.cwd,
            env={**settings, **(env or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )

    def stand_on(self, platform: str) -> None:
        """Have `uname -sm` name this one."""
        uname = self.root.parent / "bin" / "uname"
        uname.parent.mkdir(exist_ok=True)
        uname.write_text(f"#!/bin/sh\necho '{platform}'\n")
        uname.chmod(0o755)

    def asked(self, words: str) -> list[str]:
        return [line for line in self.log.read_text().splitlines() if words in line]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    root = tmp_path / "a checkout"
    shutil.copytree(ROOT / "scripts", root / "scripts")
    for name in ("pyproject.toml", "constraints.txt", "requirements-vllm.txt"):
        shutil.copy(ROOT / name, root / name)
    stand_in = tmp_path / "stand-in"
    stand_in.write_text(STAND_IN)
    stand_in.chmod(0o755)
    (tmp_path / "elsewhere").mkdir()
    made = Checkout(root, cwd=tmp_path / "elsewhere", log=tmp_path / "log")
    made.stand_on(WITH_VLLM)
    return made


def test_first_run_installs_with_the_pins_and_hands_on_the_arguments(checkout: Checkout) -> None:
    done = checkout.run("demo", "--trials", "two words")
    assert done.returncode == 0, done.stderr
    installs = checkout.asked("pip install")
    assert len(installs) == 3
    assert all("--constraint constraints.txt" in line for line in installs)
    assert checkout.asked("demo --trials two words")


def test_second_run_installs_nothing(checkout: Checkout) -> None:
    checkout.run("demo")
    checkout.run("demo")
    assert checkout.asked("-m") == []
    assert checkout.asked("demo")


@pytest.mark.parametrize("name", ["constraints.txt", "pyproject.toml"])
def test_changed_pins_or_project_are_installed_into_the_same_environment(
    checkout: Checkout, name: str
) -> None:
    checkout.run("demo")
    with (checkout.root / name).open("a") as file:
        file.write("# changed\n")
    checkout.run("demo")
    assert len(checkout.asked("pip install")) == 3
    assert checkout.asked("-m venv") == []


def test_environment_of_a_killed_installation_is_made_anew(checkout: Checkout) -> None:
    killed = checkout.run("demo", env={"KILL_PIP": "yes"})
    leftover = checkout.root / ".venv" / "leftover"
    leftover.write_text("half of a package")
    done = checkout.run("demo")
    assert (killed.returncode, done.returncode) == (1, 0)
    assert checkout.asked("-m venv")
    assert not leftover.exists()


def test_killed_installation_of_one_script_is_not_trusted_by_the_other(checkout: Checkout) -> None:
    checkout.run("demo")
    checkout.run("test", env={"KILL_PIP": "yes"})
    checkout.run("demo")
    assert checkout.asked("-m venv")


def test_failed_installation_keeps_the_environment_and_is_tried_again(checkout: Checkout) -> None:
    failed = checkout.run("demo", env={"PIP_STATUS": "1"})
    assert failed.returncode == 1
    assert "install.log" in failed.stderr
    checkout.run("demo")
    assert checkout.asked("-m venv") == []
    assert len(checkout.asked("pip install")) == 3


@pytest.mark.skipif(shutil.which("flock") is None, reason="no flock: runs don't wait there")
def test_two_runs_at_once_install_once(checkout: Checkout, tmp_path: Path) -> None:
    other = replace(checkout, log=tmp_path / "other log")
    slow = {"PIP_SECONDS": "0.3"}
    with ThreadPoolExecutor() as pool:
        runs = [pool.submit(each.run, "demo", env=slow) for each in (checkout, other)]
    assert [run.result().returncode for run in runs] == [0, 0]
    assert len(checkout.asked("pip install") + other.asked("pip install")) == 3


def test_moved_checkout_is_installed_again(checkout: Checkout, tmp_path: Path) -> None:
    checkout.run("demo")
    moved = Checkout(checkout.root.rename(tmp_path / "moved"), checkout.cwd, checkout.log)
    moved.run("demo")
    assert len(moved.asked("pip install")) == 3


def test_missing_python_is_said_with_the_mend(checkout: Checkout) -> None:
    done = checkout.run("demo", env={"PYTHON": "no-such-python"})
    assert done.returncode == 1
    assert "PYTHON=no-such-python is not a Python of version 3.11 or newer" in done.stderr


def test_arguments_to_test_run_pytest_alone(checkout: Checkout) -> None:
    done = checkout.run("test", "tests/test_house.py", "-k", "wheel")
    assert done.returncode == 0, done.stderr
    assert checkout.asked("-m pytest") == ["-m pytest tests/test_house.py -k wheel"]
    assert checkout.asked("-m ruff") == checkout.asked("-m mypy") == []


def test_without_arguments_every_check_runs_and_the_tests_come_last(checkout: Checkout) -> None:
    done = checkout.run("test")
    assert done.returncode == 0, done.stderr
    checks = [line for line in checkout.asked("") if "pip" not in line and "venv" not in line]
    assert [line.split()[1] for line in checks if line.startswith("-m")] == [
        "ruff",
        "ruff",
        "mypy",
        "pytest",
        "pytest",
    ]
    assert "test_vllm" not in checks[-2]
    assert "test_vllm" in checks[-1]
    assert checkout.asked("importlinter")


@pytest.mark.parametrize("broken", ["ruff", "mypy", "pytest"])
def test_one_broken_check_fails_the_run_but_stops_no_other(checkout: Checkout, broken: str) -> None:
    done = checkout.run("test", env={"BROKEN": broken})
    assert done.returncode == 1
    assert checkout.asked("importlinter")
    assert len(checkout.asked("-m pytest")) == 2


def test_vllm_has_an_environment_of_its_own_that_is_installed_once(checkout: Checkout) -> None:
    for installs in (3, 0):
        done = checkout.run("test_vllm", "tests/test_vllm_faults.py", "-k", "selector")
        assert done.returncode == 0, done.stderr
        assert len(checkout.asked("pip install")) == installs
        assert checkout.asked("-m pytest") == ["-m pytest tests/test_vllm_faults.py -k selector"]
    assert not (checkout.root / ".venv").exists()


def test_a_vllm_that_cannot_be_installed_fails_the_run_but_stops_no_check(
    checkout: Checkout,
) -> None:
    done = checkout.run("test", env={"BROKEN_PINS": "requirements-vllm.txt"})
    assert done.returncode == 1
    assert "vLLM's installation" in done.stderr
    assert len(checkout.asked("-m pytest")) == 1


def test_where_no_vllm_can_be_had_the_run_says_so_and_passes(checkout: Checkout) -> None:
    checkout.stand_on(WITHOUT_VLLM)
    done = checkout.run("test")
    assert done.returncode == 0, done.stderr
    assert "tests that need vLLM were left out" in done.stderr
    assert len(checkout.asked("-m pytest")) == 1
    refused = checkout.run("test_vllm")
    assert refused.returncode == 1
    assert "VLLM_PYTHON=" in refused.stderr


def test_a_python_with_a_vllm_of_its_own_is_used_as_it_is(checkout: Checkout) -> None:
    checkout.stand_on(WITHOUT_VLLM)
    own = {"VLLM_PYTHON": str(checkout.root.parent / "stand-in")}
    done = checkout.run("test_vllm", env=own)
    assert done.returncode == 0, done.stderr
    assert checkout.asked("pip") == []
    assert checkout.asked("-m pytest")
    missing = checkout.run("test_vllm", env={"VLLM_PYTHON": "/bin/false"})
    assert missing.returncode == 1
    assert "VLLM_PYTHON=/bin/false lacks" in missing.stderr


def test_a_conversion_goes_on_with_the_stage_that_is_missing(
    checkout: Checkout, tmp_path: Path
) -> None:
    data, out = tmp_path / "data", tmp_path / "out"
    assert checkout.run("convert", str(data), str(out)).returncode == 0
    stages = [line.split()[0] for line in checkout.asked("--out")]
    assert stages == ["record", "train", "train", "train"]
    starts = [line.split("--start ")[1].split()[0] for line in checkout.asked("--start")]
    assert starts == [f"{out}/text/adapter", f"{out}/agent/adapter"]
    assert all(f"--requests {out}/answers.jsonl" in line for line in checkout.asked("--start"))
    (out / "text" / "model").mkdir(parents=True)
    assert checkout.run("convert", str(data), str(out)).returncode == 0
    assert checkout.asked("train --out") == checkout.asked("--start")
    for stage in ("agent", "both"):
        (out / stage / "model").mkdir(parents=True)
    assert checkout.run("convert", str(data), str(out)).returncode == 0
    assert not checkout.asked("--out")
    assert "usage: scripts/convert DATA OUT" in checkout.run("convert", str(data)).stderr
