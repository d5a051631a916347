"""vLLM's OpenAI-compatible server in a process of its own, on a tiny model with a chat template.

In: a command, its flags. Out: the server, while the context is open.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.request import ProxyHandler, build_opener

STARTING_S = 600
FLAGS = (
    "--host=127.0.0.1",
    "--dtype=float32",
    "--max-model-len=2048",
    "--max-num-seqs=8",
    "--max-num-batched-tokens=2048",
    "--enforce-eager",
    "--gpu-memory-utilization=0.2",
)
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message.role }}: {{ message.content }}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
OURS = ("cacheslide_agents.cli", "serve")
STOCK = ("vllm.entrypoints.openai.api_server", "--model")


def chat_model(source: Path, folder: Path) -> Path:
    """The model in `source`, which has no chat template, with one."""
    shutil.copytree(source, folder)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return folder


@dataclass(frozen=True)
class Server:
    """A process that serves, or will; what it says goes to `log`."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def await_health(self) -> None:
        """Until it answers."""
        opener = build_opener(ProxyHandler({}))
        deadline = time.monotonic() + STARTING_S
        while self.process.poll() is None and time.monotonic() < deadline:
            try:
                opener.open(f"{self.url.removesuffix('/v1')}/health", timeout=5).close()
            except OSError:
                time.sleep(1)
            else:
                return
        raise AssertionError(f"the server did not start:\n{self.log.read_text()[-3000:]}")


@contextmanager
def serving(command: tuple[str, str], model: Path, log: Path, *flags: str) -> Iterator[Server]:
    """`command`: a module to run, and what stands before the model. It still has to start."""
    port = _free_port()
    argv = [sys.executable, "-m", *command, str(model), f"--port={port}", *FLAGS, *flags]
    with log.open("wb") as written:
        process = subprocess.Popen(
            argv, env=_environment(), stdout=written, stderr=written, start_new_session=True
        )
        try:
            yield Server(f"http://127.0.0.1:{port}/v1", process, log)
        finally:
            _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """With its engine and workers, which are processes of their own."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _environment() -> Mapping[str, str]:
    """As the shared engines have it; the servers import what this process would."""
    ours = {
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "TORCHDYNAMO_DISABLE": "1",
    }
    unset = ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_PLUGINS")
    return {name: value for name, value in os.environ.items() if name not in unset} | ours
