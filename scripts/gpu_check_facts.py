"""What the sections of the GPU check share, and the sections that only look: facts and vLLM.

In: a `Setting`. Out: figures in a `Report`, saved as they come.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

PACKAGES = ("torch", "triton", "transformers", "tokenizers", "accelerate", "safetensors", "vllm")


@dataclass(frozen=True)
class Setting:
    """`tiny`: sizes at which every section is a matter of seconds, on a CPU too."""

    device: str
    tiny: bool
    model: Path | None = None


class Report:
    """The figures of one section; on disk after every addition."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._figures: dict[str, Any] = {"status": "unfinished"}

    def note(self, **figures: Any) -> None:
        self._figures.update(figures)
        self._save()

    def add(self, name: str, **row: Any) -> None:
        """One row more of the table `name`."""
        self._figures.setdefault(name, []).append(row)
        self._save()

    def close(self, status: str) -> None:
        """The end, unless the section has said how it ended."""
        if self._figures["status"] == "unfinished":
            self.note(status=status)

    def skip(self, reason: str) -> None:
        self.note(status="skipped", reason=reason)

    def _save(self) -> None:
        draft = self._path.with_suffix(".tmp")  # a section may be killed at any moment
        draft.write_text(json.dumps(self._figures))
        draft.replace(self._path)


def check_facts(setting: Setting, report: Report) -> None:
    """Versions and the device, with the bandwidth of its links to the host."""
    report.note(python=platform.python_version(), machine=platform.machine())
    report.note(versions={name: installed(name) for name in PACKAGES}, cuda=torch.version.cuda)
    if setting.device != "cuda":
        return
    seen = torch.cuda.get_device_properties(0)
    report.note(
        name=seen.name,
        capability=f"{seen.major}.{seen.minor}",
        memory_gib=round(seen.total_memory / 2**30, 1),
        multiprocessors=seen.multi_processor_count,
        count=torch.cuda.device_count(),
    )
    there = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    for kind in ("pageable", "pinned"):
        here = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=kind == "pinned")
        seconds = seconds_of(lambda here=here: there.copy_(here, non_blocking=True), 5, "cuda")
        report.add("host_to_device", memory=kind, gb_per_s=round(here.nbytes / seconds / 1e9, 2))


def check_vllm(setting: Setting, report: Report) -> None:
    """Populate and shifted reuse on vLLM, by either attention, if there is one and a model."""
    if find_spec("vllm") is None:
        return report.skip("vLLM is not installed")
    if setting.model is None:
        return report.skip("no --model folder for vLLM")
    from gpu_check_backend import compare

    from vllm_cacheslide.backend import VllmBackend

    for attention in ("runs", "fused"):
        backend = VllmBackend(model=str(setting.model), max_model_len=4096, attention=attention)
        try:
            report.add("reuse", attention=attention, **compare(backend, 3000))
        finally:
            backend.close()
    return None


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def seconds_of(work: Callable[[], object], repeats: int, device: str) -> float:
    """Median seconds of `work`, run once before; on CUDA by the device's clock."""
    work()
    if device != "cuda":
        return median(_wall(work) for _ in range(repeats))
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return median(times)


def _wall(work: Callable[[], object]) -> float:
    begin = perf_counter()
    work()
    return perf_counter() - begin
