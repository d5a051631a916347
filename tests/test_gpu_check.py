"""The GPU check on a CPU, at tiny sizes: it reports what it finds, and survives what goes wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "scripts"


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The check's modules, as its script sees them."""
    monkeypatch.syspath_prepend(str(SCRIPTS))

    def load(name: str) -> ModuleType:
        return __import__(name)

    return load


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_script_measures_kernels_and_writes_one_report(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    tiny = ["--device", "cpu", "--tiny", "--out", str(out)]
    done = subprocess.run(
        ["bash", str(SCRIPTS / "gpu_check"), *tiny, "--only", "facts", "numerics", "speed"],
        env={**os.environ, "PYTHON": sys.executable},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    sections = json.loads(out.read_text())["sections"]
    assert [section["status"] for section in sections.values()] == ["ok"] * 3
    assert sections["facts"]["versions"]["torch"].startswith("2.")
    assert all(row["ok"] for row in sections["numerics"]["rows"])
    (row,), (selected,) = sections["speed"]["rows"], sections["speed"]["selected"]
    assert min(row[f"{name}_s"] for name in ("sdpa", "plain", "contextual", "shut")) > 0
    assert selected["rows"] == selected["keys"] == 32


def test_reuse_of_random_models_is_compared_with_dense(parts: Any, tmp_path: Path) -> None:
    facts, backend = parts("gpu_check_facts"), parts("gpu_check_backend")
    path = tmp_path / "llama.json"
    backend.check_llama(facts.Setting("cpu", tiny=True), facts.Report(path))
    found = json.loads(path.read_text())
    assert [row["tokens"] for row in found["reuse"]] == [300, 600, 300, 600]
    assert [row["kernels"] for row in found["contextual"]] == [True, False]
    for row in found["reuse"] + found["contextual"]:
        assert row["outcome"] in ("hit", "partial"), row["reason"]
        assert 0 < row["compute_fraction"] < 1
        assert 0 <= row["kl_mean"] < 0.5


def test_loads_are_measured_inline_and_ahead(parts: Any, tmp_path: Path) -> None:
    facts, backend = parts("gpu_check_facts"), parts("gpu_check_backend")
    path = tmp_path / "overlap.json"
    backend.check_overlap(facts.Setting("cpu", tiny=True), facts.Report(path))
    loading = json.loads(path.read_text())["loading"]
    assert [row["prefetch"] for row in loading] == [0, 1, 4]
    assert all(row["load_s"] > 0 for row in loading)


def test_sections_without_what_they_need_say_so(parts: Any, tmp_path: Path) -> None:
    facts, backend = parts("gpu_check_facts"), parts("gpu_check_backend")
    path = tmp_path / "skipped.json"
    report = facts.Report(path)
    backend.check_smollm2(facts.Setting("cpu", tiny=True), report)
    report.close("ok")
    assert json.loads(path.read_text()) == {"status": "skipped", "reason": "no --model folder"}


def test_section_that_raises_reports_its_error(parts: Any, tmp_path: Path) -> None:
    check, path = parts("gpu_check"), tmp_path / "failed.json"
    words = ["--device", "cpu", "--tiny", "--model", str(tmp_path / "none"), "--out", str(path)]
    assert check.run_section("smollm2", check.arguments(words)) == 0
    found = json.loads(path.read_text())
    assert found["status"] == "failed"
    assert str(tmp_path / "none") in found["error"]


def test_section_that_hangs_or_dies_costs_only_itself(parts: Any) -> None:
    check = parts("gpu_check")
    hanging = [sys.executable, "-c", "print('so far', flush=True); import time; time.sleep(99)"]
    status, words = check.watched(hanging, os.environ, 5)
    assert (status, words.strip()) == ("timed out after 5 s", "so far")
    status, words = check.watched(
        [sys.executable, "-c", "import os; os.write(2, b'oh'); os._exit(3)"], os.environ, 60
    )
    assert (status, words) == ("died with 3", "oh")


def test_no_time_left_skips_a_section(parts: Any, tmp_path: Path) -> None:
    check = parts("gpu_check")
    given = check.arguments(["--out", str(tmp_path / "gpu.json")])
    assert check.start_section("facts", given, 1)["status"] == "skipped"


def test_the_check_ends_within_eight_minutes(parts: Any) -> None:
    assert parts("gpu_check").BUDGET < 480
