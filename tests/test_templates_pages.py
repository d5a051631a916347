"""The template pages name every chunk, their links lead somewhere, their examples are true."""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from cacheslide_agents.prompt.template import PromptTemplate, template_names

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "reflexion": ("reflexion", "reflexion_react"),
    "memgpt": ("memgpt",),
    "swe_agent": ("swe_agent",),
}


def page(name: str) -> str:
    return (ROOT / "docs" / "templates" / f"{name}.md").read_text(encoding="utf-8")


def tables(text: str) -> Iterator[dict[str, str]]:
    """Chunk id -> role of each table of segments."""
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in block.splitlines()]
        if rows[0][:2] == ["chunk", "role"]:
            yield {row[0].strip("`"): row[1] for row in rows[2:]}


def test_every_packaged_template_has_a_page() -> None:
    assert {name for names in PAGES.values() for name in names} == set(template_names())
    assert {path.stem for path in (ROOT / "docs" / "templates").iterdir()} == set(PAGES)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_lists_the_chunks_of_its_templates_with_their_roles(name: str) -> None:
    found = list(tables(page(name)))
    assert len(found) == len(PAGES[name])
    for template, listed in zip(PAGES[name], found, strict=True):
        declared = {one.id: one.role.value for one in PromptTemplate.named(template).chunks()}
        assert listed == declared


@pytest.mark.parametrize("name", PAGES)
def test_a_page_says_when_prefix_caching_would_do(name: str) -> None:
    assert "\n## When plain prefix caching would do as well\n" in page(name)


@pytest.mark.parametrize("name", PAGES)
def test_every_link_leads_to_a_file(name: str) -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", page(name))
    assert links
    assert [link for link in links if not (ROOT / "docs" / "templates" / link).exists()] == []


@pytest.mark.parametrize("name", PAGES)
def test_the_worked_example_prints_what_the_page_says(name: str, tmp_path: Path) -> None:
    text = page(name)
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (printed,) = re.findall(r"```text\n(.*?)```", text, re.DOTALL)
    script = tmp_path / "example.py"
    script.write_text(code, encoding="utf-8")
    out = StringIO()
    with redirect_stdout(out):
        runpy.run_path(str(script))
    assert out.getvalue() == printed
