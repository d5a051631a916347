"""Runs the sections of the GPU check, each in a process and under a time limit of its own.

In: a device, perhaps a folder of SmolLM2. Out: one JSON, written anew after every section. A
section that fails, hangs or takes the device down with it costs its own figures only; what it had
measured until then is kept.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any


@dataclass(frozen=True)
class Section:
    """A function of a module beside this one, and the seconds it may take (or what is left)."""

    module: str
    function: str
    seconds: int


SECTIONS: Mapping[str, Section] = {
    "facts": Section("gpu_check_facts", "check_facts", 40),
    "numerics": Section("gpu_check_kernels", "check_numerics", 110),
    "speed": Section("gpu_check_kernels", "check_speed", 110),
    "llama_1b": Section("gpu_check_backend", "check_llama", 130),
    "smollm2": Section("gpu_check_backend", "check_smollm2", 50),
    "overlap": Section("gpu_check_backend", "check_overlap", 50),
    "vllm": Section("gpu_check_facts", "check_vllm", 160),
}
BUDGET = 465
"""Seconds for all of them: 8 minutes, less what starting and writing take."""
PATIENCE = 20
"""How much longer tiny sizes may take, on a CPU that has other things to do."""


def main() -> int:
    given = arguments()
    if given.inside:
        return run_section(given.inside, given)
    started, patience = perf_counter(), PATIENCE if given.tiny else 1
    found: dict[str, Any] = {"schema": 1, "device": given.device, "tiny": given.tiny}
    found["sections"] = {}
    save(given.out, found)  # where that cannot be done is said now, not after the first section
    for name in given.only or SECTIONS:
        left = BUDGET * patience - (perf_counter() - started)
        limit = min(SECTIONS[name].seconds * patience, left)
        found["sections"][name] = start_section(name, given, limit)
        found["seconds"] = round(perf_counter() - started, 1)
        save(given.out, found)
        section = found["sections"][name]
        print(f"{name}: {section['status']} {section.get('error', '')}".rstrip(), flush=True)
    trouble = [s for s in found["sections"].values() if s["status"] not in ("ok", "skipped")]
    return 1 if trouble else 0


def save(out: Path, found: Mapping[str, Any]) -> None:
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(found, indent=1) + "\n")
    except OSError as error:
        sys.exit(f"error: --out {out} cannot be written ({error.strerror})")


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("gpu_check.json"))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--model", type=Path, help="folder of SmolLM2-135M-Instruct")
    parser.add_argument("--tiny", action="store_true", help="small sizes: does the check work?")
    parser.add_argument("--only", nargs="+", choices=tuple(SECTIONS))
    parser.add_argument("--inside", choices=tuple(SECTIONS), help=argparse.SUPPRESS)
    return parser.parse_args(words)


def start_section(name: str, given: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """Its figures, `status` and `seconds`."""
    if seconds < 5:
        return {"status": "skipped", "reason": "no time left"}
    begin = perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        partial = Path(folder) / "section.json"
        command = [sys.executable, __file__, "--inside", name, "--out", str(partial)]
        command += ["--device", given.device, *(["--tiny"] if given.tiny else [])]
        command += ["--model", str(given.model)] if given.model else []
        status, words = watched(command, environment(given), seconds)
        figures = json.loads(partial.read_text()) if partial.exists() else {}
    if status:
        figures = {**figures, "status": status, "output": words[-2000:]}
    return {**figures, "seconds": round(perf_counter() - begin, 1)}


def watched(command: list[str], env: Mapping[str, str], seconds: float) -> tuple[str, str]:
    """Trouble that the section itself could not report, and what it printed."""
    with subprocess.Popen(
        command,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as section:
        try:
            words, _ = section.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(section.pid, signal.SIGKILL)  # an engine's own processes, too
            words, _ = section.communicate()
            return f"timed out after {seconds:.0f} s", words
        except BaseException:
            os.killpg(section.pid, signal.SIGKILL)
            raise
    return (f"died with {section.returncode}" if section.returncode else ""), words


def environment(given: argparse.Namespace) -> dict[str, str]:
    """Without a GPU the kernels run in triton's interpreter."""
    return {**os.environ, **({"TRITON_INTERPRET": "1"} if given.device == "cpu" else {})}


def run_section(name: str, given: argparse.Namespace) -> int:
    """Inside the section's own process: run it; whatever it raises becomes part of the report."""
    from gpu_check_facts import Report, Setting

    report, section = Report(given.out), SECTIONS[name]
    try:
        run = getattr(import_module(section.module), section.function)
        run(Setting(given.device, given.tiny, given.model), report)
        report.close("ok")
    except Exception as error:
        trace = traceback.format_exc()[-3000:]
        report.note(status="failed", error=f"{type(error).__name__}: {error}", trace=trace)
    return 0


if __name__ == "__main__":
    sys.exit(main())
