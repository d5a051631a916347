"""A bounded shell: one command at a time in one folder.

In: a command line. Out: its exit code and output, cut in the middle where it is long.

What is confined, where the kernel lets an ordinary user do it (Linux with user namespaces and
Landlock; `confinement` says what holds on this machine):

- network: commands see no network device that leads anywhere;
- processes: whatever a command leaves running is killed when it ends;
- writes: files are made, changed, moved and removed below the folder only.

Always: time, CPU seconds, memory and file size of each process, the length of the output, and the
environment, which holds `PATH`, `HOME` and `TMPDIR` (the folder), `LANG` and
`PYTHONDONTWRITEBYTECODE`, and nothing of the caller's.

What is not: commands run as the calling user and can READ whatever that user can, and speak to
local services by their Unix sockets (a container daemon's, say); permissions and time stamps of the
user's files can be changed anywhere; disk space below the folder is bounded per file only. Give an
untrusted model a container or a machine of its own.
"""

from __future__ import annotations

import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from time import monotonic
from typing import IO

from cacheslide_agents.errors import RequestError
from langchain_cacheslide.agents.confine import TRUNCATES, landlock_version

MIB = 1 << 20
_LAUNCHER = Path(__file__).with_name("confine.py")
_ALONE = ("--map-root-user", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")
_PROCESSES = 128
_CANNOT_RUN = 126  # as shells say it
_READ = 1 << 16


@dataclass(frozen=True, slots=True)
class Confinement:
    """What commands cannot reach on this machine."""

    network: bool
    processes: bool
    writes: bool

    def __str__(self) -> str:
        held = {
            "no network": self.network,
            "nothing left running": self.processes,
            "no writes outside its folder": self.writes,
        }
        return ", ".join(name for name, holds in held.items() if holds) or "limits only"


@dataclass(frozen=True, slots=True)
class Result:
    """`code` is the exit code, `None` where the time ran out."""

    code: int | None
    output: str

    def __str__(self) -> str:
        ending = "time ran out" if self.code is None else f"exit code {self.code}"
        return f"{self.output.rstrip()}\n({ending})".lstrip("\n")


@dataclass(frozen=True)
class Shell:
    """Runs commands in `folder` with bash.

    `timeout_s`: seconds of wall time, and of CPU time per process; `output_chars`: characters of
    output that are kept, half from its start and half from its end; `memory_bytes`: address space
    per process; `file_bytes`: size of a file. `RequestError` for a folder that is not there.
    """

    folder: Path
    timeout_s: float = 20.0
    output_chars: int = 2400
    memory_bytes: int = 1024 * MIB
    file_bytes: int = 64 * MIB

    def __post_init__(self) -> None:
        if not self.folder.is_dir():
            raise RequestError(f"the shell's folder {self.folder} is not there; make it first")
        if shutil.which("bash") is None:
            raise RequestError("the shell tool needs bash, which is not installed")

    @property
    def confinement(self) -> Confinement:
        alone = _can_be_alone()
        return Confinement(network=alone, processes=alone, writes=landlock_version() >= TRUNCATES)

    def run(self, command: str) -> Result:
        """Run `command`; whatever it does, this returns after about `timeout_s`."""
        try:
            process = self._started(command)
        except (OSError, ValueError) as error:  # too long, a NUL, half a character, no folder
            return Result(_CANNOT_RUN, f"the command cannot be run: {error}")
        assert process.stdout is not None
        deadline = monotonic() + self.timeout_s
        try:
            output = self._read(process.stdout, deadline)
            ended = _ends_by(process, deadline)
        finally:
            _kill(process)
            process.stdout.close()
        return Result(process.returncode if ended else None, output)

    def _started(self, command: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self._command(command),
            cwd=self.folder,
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def _command(self, command: str) -> list[str]:
        folder = str(self.folder.resolve())
        alone = _can_be_alone()
        limits = {
            "cpu": max(1, round(self.timeout_s)),
            "as": self.memory_bytes,
            "fsize": self.file_bytes,
            "core": 0,
            # Counted per user; only in a namespace of its own is that the command's own count.
            **({"nproc": _PROCESSES} if alone else {}),
            **({"folder": folder} if landlock_version() else {}),
        }
        launcher = [sys.executable, "-I", "-S", str(_LAUNCHER), json.dumps(limits)]
        return [*(["unshare", *_ALONE] if alone else []), *launcher, "bash", "-c", command]

    def _environment(self) -> dict[str, str]:
        here = str(self.folder.resolve())
        path = os.pathsep.join((str(Path(sys.executable).parent), os.defpath))
        home = {"HOME": here, "TMPDIR": here}
        return {"PATH": path, "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1", **home}

    def _read(self, stream: IO[bytes], deadline: float) -> str:
        """The output until it is closed; what is cut out is dropped as it comes."""
        half = 2 * self.output_chars  # bytes: UTF-8 takes up to four a character, two in each half
        head, tail, dropped = b"", b"", 0
        with selectors.DefaultSelector() as waiting:
            waiting.register(stream, selectors.EVENT_READ)
            while (left := deadline - monotonic()) > 0 and waiting.select(left):
                piece = os.read(stream.fileno(), _READ)
                if not piece:
                    break
                room = max(0, half - len(head))
                head, rest = head + piece[:room], tail + piece[room:]
                tail = rest[-half:]
                dropped += len(rest) - len(tail)
        return self._cut(head, tail, dropped)

    def _cut(self, head: bytes, tail: bytes, dropped: int) -> str:
        first, last = (part.decode(errors="replace") for part in (head, tail))
        if not dropped and len(first + last) <= self.output_chars:
            return (head + tail).decode(errors="replace")
        half = self.output_chars // 2
        whole = first + last
        gap = len(whole) - 2 * half + dropped
        return f"{whole[:half]}\n[... about {gap} characters left out ...]\n{whole[-half:]}"


@cache
def _can_be_alone() -> bool:
    """Whether this user may have network and process namespaces of its own."""
    if shutil.which("unshare") is None:
        return False
    tried = subprocess.run(
        ["unshare", *_ALONE, "true"], stdin=subprocess.DEVNULL, capture_output=True, check=False
    )
    return tried.returncode == 0


def _ends_by(process: subprocess.Popen[bytes], deadline: float) -> bool:
    """Whether the command ends by itself in time: it may go on with its output closed."""
    try:
        process.wait(timeout=max(0.0, deadline - monotonic()))
    except subprocess.TimeoutExpired:
        return False
    return True


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the command and its process group. A command that ended by itself keeps its exit code."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
