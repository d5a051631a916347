"""The documents: links lead somewhere, named files exist, and the code in them is code."""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest
from typer.main import get_command

from cacheslide_agents.cli.commands import app
from cacheslide_agents.policies import Policy

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
DOCUMENTS = [README, ROOT / "examples" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SOURCES = [ROOT, ROOT / "cacheslide_agents", ROOT / "backends", ROOT / "integrations"]
INVENTED = re.compile(r"my_policy|[A-Z]+/")
"""In the names of files that are the reader's own."""
FENCE = "```"


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def prose(document: Path) -> Iterator[str]:
    """The lines of a document that stand in no fenced block."""
    fenced = False
    for line in document.read_text("utf-8").splitlines():
        if line.lstrip().startswith(FENCE):
            fenced = not fenced
        elif not fenced:
            yield line
    assert not fenced, "a block has no end"


def anchors(document: Path) -> set[str]:
    """What a link can lead to, as GitHub names headings."""
    headings = [line.lstrip("#") for line in prose(document) if line.startswith("#")]
    return {re.sub(r"[^\w\- ]", "", each.strip().lower()).replace(" ", "-") for each in headings}


def links(document: Path) -> list[str]:
    """Those that stay in the project."""
    found = re.findall(r"\]\(([^)]+)\)", "\n".join(prose(document)))
    return [link for link in found if not link.startswith(("http://", "https://"))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_every_link_leads_to_a_file_and_to_a_heading_in_it(document: Path) -> None:
    broken = []
    for link in links(document):
        file, _, anchor = link.partition("#")
        target = document.parent / file if file else document
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


def test_a_broken_anchor_is_found() -> None:
    assert "serve-it" in anchors(ROOT / "docs" / "vllm.md")
    assert "serve-them" not in anchors(ROOT / "docs" / "vllm.md")


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_every_source_file_that_is_named_exists(document: Path) -> None:
    named = re.findall(r"`([\w/.-]+/[\w.-]*)`", document.read_text(encoding="utf-8"))
    missing = [n for n in named if not any((source / n).exists() for source in SOURCES)]
    assert [n for n in missing if not INVENTED.search(n)] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_every_block_of_code_is_fenced(document: Path) -> None:
    """An indented block right behind a list is rendered as a part of its last point."""
    assert [line for line in prose(document) if line.startswith("    ") and line.strip()] == []


def test_readme_code_is_the_quickstart_example() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text("utf-8"), re.DOTALL)
    assert (ROOT / "examples" / "quickstart.py").read_text("utf-8").endswith(f"\n\n{code}")


def test_every_command_is_described() -> None:
    _, *told = re.findall(r"^\| (`.*?) \|", "\n".join(prose(ROOT / "docs" / "commands.md")), re.M)
    described = {command for cell in told for command in re.findall(r"`(\w+)`", cell)}
    commands = getattr(get_command(app), "commands", {})
    assert commands
    assert described == set(commands)


def test_policy_in_the_guide_is_a_policy(tmp_path: Path) -> None:
    guide = (ROOT / "docs" / "extending.md").read_text("utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    (tmp_path / "my_policy.py").write_text(dedent(code))
    policy = runpy.run_path(str(tmp_path / "my_policy.py"))["MyPolicy"]()
    assert isinstance(policy, Policy)
    assert policy.name == "my_policy"
