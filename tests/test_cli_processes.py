"""How a `cacheslide` process ends: interrupted, with nobody reading, with a real model."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parent.parent
FAKE = """
import sys
sys.path.insert(0, {root!r})
from tests.support.fake_backend import FakeBackend
from cacheslide_agents.cli import engine, main
fake = FakeBackend(pause_s={pause_s})
engine.load_backend = lambda name, **options: fake
try:
    main()
finally:
    print("stopped", fake.stopped, "closed", fake.closed, file=sys.stderr)
"""


def start(*command: str, **options: Any) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    # a shell's background jobs ignore SIGINT, and hand that down
    return subprocess.Popen(
        command, text=True, env=environment, preexec_fn=heed_sigint, **{**pipes, **options}
    )


def heed_sigint() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def faked(*arguments: str, pause_s: float = 0.0) -> subprocess.Popen[str]:
    """`cacheslide ARGUMENTS` on a backend without a model that takes its time."""
    code = FAKE.format(root=str(ROOT), pause_s=pause_s)
    return start(sys.executable, "-c", code, *arguments)


def pipe(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream


def interrupt_after_first_word(process: subprocess.Popen[str]) -> str:
    """What is on stderr at the end."""
    pipe(process.stdout).read(1)
    process.send_signal(signal.SIGINT)
    return process.communicate(timeout=240)[1]


def test_ctrl_c_in_the_middle_of_an_answer_stops_the_backend_and_exits_130() -> None:
    process = faked("generate", "word " * 500, pause_s=0.05)
    stderr = interrupt_after_first_word(process)
    assert process.returncode == 130
    assert stderr.split() == ["stopped", "1", "closed", "True"]


def test_ctrl_c_at_the_prompt_of_a_chat_exits_130() -> None:
    process = faked("chat")
    pipe(process.stdin).write("Hello\n")
    pipe(process.stdin).flush()
    pipe(process.stderr).readline()
    stderr = interrupt_after_first_word(process)
    assert process.returncode == 130
    assert stderr.split() == ["stopped", "0", "closed", "True"]


def test_reader_that_goes_away_is_no_error_message() -> None:
    with faked("generate", "word " * 500, pause_s=0.01) as process:
        pipe(process.stdout).read(1)
        pipe(process.stdout).close()
        stderr = pipe(process.stderr).read()
    assert process.returncode == 141
    assert stderr.split() == ["stopped", "1", "closed", "True"]


def test_reader_that_never_came_is_no_error_message() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    process = start(
        sys.executable, "-m", "cacheslide_agents.cli", "inspect", "memgpt", stdout=writing
    )
    os.close(writing)
    stderr = process.communicate(timeout=240)[1]
    assert process.returncode == 141
    assert "Traceback" not in stderr
    assert "Broken" not in stderr


def test_ctrl_c_during_a_real_answer_exits_130(tiny_model: str) -> None:
    command = (sys.executable, "-m", "cacheslide_agents.cli", "generate", "Count.")
    process = start(*command, "--max-tokens", "8000", "--model", tiny_model)
    stderr = interrupt_after_first_word(process)
    assert process.returncode == 130
    assert "Traceback" not in stderr


def test_ctrl_c_while_the_commands_load_exits_130_without_a_traceback() -> None:
    code = """
import sys

class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == "typer":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupts())
from cacheslide_agents.cli import main
main()
"""
    process = start(sys.executable, "-c", code, "--help")
    assert process.communicate(timeout=240) == ("", "\n")
    assert process.returncode == 130


def test_version_is_that_of_the_distribution() -> None:
    process = start(sys.executable, "-m", "cacheslide_agents.cli", "--version")
    assert process.communicate(timeout=240) == (f"cacheslide-agents {installed()}\n", "")


def installed() -> str:
    with open(ROOT / "pyproject.toml", "rb") as file:
        return str(tomllib.load(file)["project"]["version"])
