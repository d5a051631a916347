"""The bounded shell: what commands can do, and what they cannot, on this machine."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from cacheslide_agents.errors import RequestError
from langchain_cacheslide.agents.shell import Confinement, Result, Shell


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    folder = tmp_path / "work"
    folder.mkdir()
    return Shell(folder, timeout_s=15.0)


def needs(held: bool) -> None:
    if not held:
        pytest.skip("this kernel does not let this user confine processes so")


def test_commands_run_in_the_folder_and_report_their_exit_code(shell: Shell) -> None:
    done = shell.run("echo one > a; cat a; pwd; exit 3")
    assert done == Result(3, f"one\n{shell.folder}\n")
    assert str(done) == f"one\n{shell.folder}\n(exit code 3)"


def test_environment_of_the_caller_stays_with_the_caller(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_SECRET", "hidden")
    seen = shell.run("env").output
    assert "hidden" not in seen
    assert f"HOME={shell.folder}\n" in seen


def test_time_that_runs_out_ends_the_command_and_all_it_started(shell: Shell) -> None:
    done = Shell(shell.folder, timeout_s=5.0).run("sleep 500 & echo started; sleep 500")
    assert (done.code, done.output) == (None, "started\n")


@pytest.mark.parametrize("alone", [True, False])
def test_command_that_closes_its_output_may_still_finish(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, alone: bool
) -> None:
    if not alone:
        monkeypatch.setattr("langchain_cacheslide.agents.shell._can_be_alone", lambda: False)
    assert shell.run("exec >/dev/null 2>&1; sleep 1; touch done; exit 3") == Result(3, "")
    assert (shell.folder / "done").exists()


def test_long_output_keeps_its_start_and_its_end(shell: Shell) -> None:
    done = Shell(shell.folder, output_chars=100).run("seq 1 5000")
    first, note, last = done.output.split("\n[... ")[0], "left out ...]", done.output[-50:]
    assert "".join(f"{n}\n" for n in range(1, 5001)).startswith(first)
    assert last == "".join(f"{n}\n" for n in range(1, 5001))[-50:]
    assert note in done.output
    assert len(done.output) < 200


def test_output_without_end_is_dropped_while_it_comes(shell: Shell) -> None:
    done = Shell(shell.folder, timeout_s=1.0, output_chars=10).run("yes")
    assert done.code is None
    assert len(done.output) < 100


def test_memory_and_file_size_are_bounded(shell: Shell) -> None:
    small = Shell(shell.folder, memory_bytes=256 << 20, file_bytes=4096)
    assert "MemoryError" in small.run("python -c 'bytearray(1 << 30)'").output
    small.run("head -c 100000 /dev/zero > big")
    assert (shell.folder / "big").stat().st_size == 4096


def test_nothing_outside_the_folder_can_be_made_changed_or_removed(
    shell: Shell, tmp_path: Path
) -> None:
    needs(shell.confinement.writes)
    kept = tmp_path / "kept"
    kept.write_text("as it was")
    shell.run(f"echo x > {tmp_path}/new; echo x > {kept}; rm {kept}; mv {kept} here; ln {kept} l")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "work"]
    assert kept.read_text() == "as it was"
    assert shell.run("echo x > a && mv a b && rm b && echo > /dev/null").code == 0


def test_no_network_is_in_reach(shell: Shell) -> None:
    needs(shell.confinement.network)
    code = "import socket; socket.create_connection(('192.0.2.1', 9), 5)"
    assert "unreachable" in shell.run(f'python -c "{code}"').output


def test_processes_that_leave_the_group_die_with_their_command(shell: Shell) -> None:
    needs(shell.confinement.processes)
    seconds = str(secrets.randbelow(10**8) + 10**8)
    shell.run(f"setsid sleep {seconds} & echo")
    assert not [line for line in command_lines() if seconds.encode() in line]


def command_lines() -> Iterator[bytes]:
    """Of the processes that are running; some end while they are looked at."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            yield (Path("/proc") / pid / "cmdline").read_bytes()


def test_confinement_is_told_in_words() -> None:
    assert str(Confinement(False, False, False)) == "limits only"
    told = str(Confinement(network=True, processes=False, writes=True))
    assert told == "no network, no writes outside its folder"


def test_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="make it first"):
        Shell(tmp_path / "nowhere")


@pytest.mark.parametrize("command", ["echo \0", "echo \ud800", "x" * 200_000])
def test_command_that_cannot_be_started_is_an_answer_and_no_error(
    shell: Shell, command: str
) -> None:
    found = shell.run(command)
    assert found.code == 126
    assert found.output.startswith("the command cannot be run: ")


def test_folder_that_is_gone_is_an_answer_and_no_error(shell: Shell) -> None:
    shell.folder.rmdir()
    assert "No such file" in shell.run("ls").output


@pytest.mark.parametrize(("version", "writes"), [(0, False), (2, False), (3, True)])
def test_landlock_that_lets_files_be_truncated_does_not_count_as_confined(
    shell: Shell, version: int, writes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("langchain_cacheslide.agents.shell.landlock_version", lambda: version)
    assert shell.confinement.writes is writes
