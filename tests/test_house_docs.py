"""The documents: links lead somewhere, named files exist, and the code in them is code."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from textwrap import dedent

import pytest

from cacheslide_agents.policies import Policy

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SOURCES = [ROOT, ROOT / "cacheslide_agents", ROOT / "backends", ROOT / "integrations"]
INVENTED = "my_policy"


def name(path: Path) -> str:
    return path.name


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_every_link_leads_to_a_file(document: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", document.read_text(encoding="utf-8"))
    assert [link for link in links if not (document.parent / link).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_every_source_file_that_is_named_exists(document: Path) -> None:
    named = re.findall(r"`([\w/.-]+/[\w.-]*)`", document.read_text(encoding="utf-8"))
    missing = [n for n in named if not any((source / n).exists() for source in SOURCES)]
    assert [n for n in missing if INVENTED not in n] == []


def test_readme_code_is_the_quickstart_example() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", DOCUMENTS[0].read_text("utf-8"), re.DOTALL)
    assert (ROOT / "examples" / "quickstart.py").read_text("utf-8").endswith(f"\n\n{code}")


def test_policy_in_the_guide_is_a_policy(tmp_path: Path) -> None:
    guide = (ROOT / "docs" / "extending.md").read_text("utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    (tmp_path / "my_policy.py").write_text(dedent(code))
    policy = runpy.run_path(str(tmp_path / "my_policy.py"))["MyPolicy"]()
    assert isinstance(policy, Policy)
    assert policy.name == INVENTED
