"""Templates: tags become chunks; every mistake is one error with file and line."""

from __future__ import annotations

import pickle
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from cacheslide_agents.chunks import ChunkedPrompt, Role
from cacheslide_agents.errors import TemplateError
from cacheslide_agents.prompt.template import PromptTemplate, TemplateChunk, template_names
from langchain_cacheslide import TemplateRunnable

TWO = """\
{% message "system" %}
{% reuse "rules" %}
Be brief.
{% endreuse %}
{% endmessage %}
{% message "user" %}
Now is {{ now }}.
{% recompute "question" %}
{{ question }}
{%- endrecompute %}
{% endmessage %}
"""


def shape(prompt: ChunkedPrompt) -> list[tuple[str, list[tuple[str, str, Role]]]]:
    return [(m.role, [(c.id, c.text, c.role) for c in m.chunks]) for m in prompt.messages]


def test_tags_become_chunks_and_untagged_text_a_recompute_chunk() -> None:
    prompt = PromptTemplate.from_string(TWO, task="qa").render(now="noon", question="Why?")
    assert prompt.task == "qa"
    assert shape(prompt) == [
        ("system", [("rules", "Be brief.\n", Role.REUSE)]),
        (
            "user",
            [
                ("text-1", "Now is noon.\n", Role.RECOMPUTE),
                ("question", "Why?", Role.RECOMPUTE),
            ],
        ),
    ]


def test_ids_may_be_expressions_in_loops_and_macros() -> None:
    source = (
        '{% macro doc(d) %}{% reuse "doc-" ~ d %}{{ d }}{% endreuse %}{% endmacro %}'
        '{% message "user" %}{% for d in docs %}{{ doc(d) }}{% endfor %}'
        "{% reuse 7 %}seven{% endreuse %}{% endmessage %}"
    )
    prompt = PromptTemplate.from_string(source).render(docs=["a", "b"])
    assert [(c.id, c.text) for c in prompt.chunks()] == [
        ("doc-a", "a"),
        ("doc-b", "b"),
        ("7", "seven"),
    ]


def test_an_empty_chunk_stays_and_empty_text_between_chunks_does_not() -> None:
    source = '{% message "user" %}{% reuse "a" %}{{ x }}{% endreuse %}{{ x }}{% endmessage %}'
    prompt = PromptTemplate.from_string(source).render(x="")
    assert [(c.id, c.text) for c in prompt.chunks()] == [("a", "")]


def test_a_generated_id_gives_way_to_the_authors() -> None:
    source = '{% message "user" %}loose{% reuse "text-1" %}x{% endreuse %}{% endmessage %}'
    ids = [c.id for c in PromptTemplate.from_string(source).render().chunks()]
    assert ids == ["text-1-2", "text-1"]


def test_messages_may_have_computed_roles() -> None:
    source = "{% for r in roles %}{% message r %}x{% endmessage %}{% endfor %}"
    prompt = PromptTemplate.from_string(source).render(roles=["user", "assistant", "tool"])
    assert [m.role for m in prompt.messages] == ["user", "assistant", "tool"]


def test_values_are_not_escaped_and_json_keeps_its_order_and_letters() -> None:
    source = '{% message "user" %}{{ x }} {{ d | tojson }}{% endmessage %}'
    prompt = PromptTemplate.from_string(source).render(x="<b>&", d={"z": "<ü>", "a": 1})
    assert prompt.messages[0].content == '<b>& {"z": "<ü>", "a": 1}'


M = '{%% message "user" %%}%s{%% endmessage %%}'
MISTAKES: list[tuple[str, int | None, str]] = [
    (M % '\n{% reuse "a" %}{% endreuse %}\n{% reuse "a" %}{% endreuse %}', 3, "used twice"),
    (
        M % '\n{% reuse "a" %}\n{% recompute "b" %}{% endrecompute %}{% endreuse %}',
        3,
        "inside chunk 'a'",
    ),
    (M % (M % ""), 1, "inside the message"),
    ('\n{% reuse "a" %}x{% endreuse %}', 2, "outside a message"),
    ("just text", None, "text outside a message: 'just text'"),
    ('{% message "narrator" %}{% endmessage %}', 1, "unknown message role 'narrator'"),
    (M % '{% reuse "" %}x{% endreuse %}', 1, "non-empty string"),
    (M % "{% reuse none %}x{% endreuse %}", 1, "non-empty string"),
    (M % "\n\n{{ missing }}", 3, "'missing' is undefined"),
    (M % "\n{{ given.field }}", 2, "has no attribute 'field'"),
    (M % "\n{% reuse nothing %}x{% endreuse %}", 2, "'nothing' is undefined"),
    ("{% if true %}", 1, "endif"),
    (M % '\n{% reuse "a" %}x', 2, "endreuse"),
    (M % "{% reuse %}x{% endreuse %}", 1, "{% reuse %} needs an id"),
    ("{% message %}x{% endmessage %}", 1, "{% message %} needs a role"),
    (M % "\n{% nonsense %}", 2, "unknown tag 'nonsense'"),
    (M % "\n{{ 1 / 0 }}", 2, "division by zero"),
    (M % "\n{{ ''.__class__ }}", 2, "unsafe"),
    (M % "\n{% include 'nowhere.jinja' %}", 2, "cannot find the template 'nowhere.jinja'"),
    (M % "{{ 10 ** 5000 }}", None, "cannot be compiled: Exceeds the limit"),
    (M % f"{{{{ {'1' * 5000} }}}}", None, "cannot be compiled: Exceeds the limit"),
    (M % f"{{{{ 0x{'f' * 5000} }}}}", None, "cannot be compiled: Exceeds the limit"),
    ("{% set x = 1 %}", None, "rendered no message"),
    (
        M % '{% set x %}{% reuse "a" %}x{% endreuse %}{% endset %}',
        1,
        "captured, filtered or printed twice",
    ),
    (
        M % '{% set x %}{% reuse "a" %}x{% endreuse %}{% endset %}{{ x }}{{ x }}',
        1,
        "captured, filtered or printed twice",
    ),
    ("{% set x %}" + M % "x" + "{% endset %}{{ x | upper }}", None, "captured, filtered"),
]


@pytest.mark.parametrize(("source", "line", "message"), MISTAKES)
def test_a_mistake_is_a_template_error_with_its_line(
    source: str, line: int | None, message: str
) -> None:
    with pytest.raises(TemplateError) as caught:
        PromptTemplate.from_string(source).render(given={})
    assert caught.value.line == line
    assert message in str(caught.value)
    assert str(caught.value).startswith("<string>" if line is None else f"<string>:{line}: ")


@pytest.mark.parametrize("source", ["", " \n\t\n"])
def test_an_empty_template_is_refused(source: str) -> None:
    with pytest.raises(TemplateError, match="the template is empty"):
        PromptTemplate.from_string(source)


def test_a_template_file_takes_its_task_from_its_name(tmp_path: Path) -> None:
    path = tmp_path / "triage.jinja"
    path.write_text(M % "Grüße", encoding="utf-8")
    prompt = PromptTemplate.from_file(path).render()
    assert prompt.task == "triage"
    assert prompt.messages[0].content == "Grüße"
    assert PromptTemplate.from_file(path, task="other").render().task == "other"


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(TemplateError, match=r"gone\.jinja: cannot read the template: No such file"):
        PromptTemplate.from_file(tmp_path / "gone.jinja")


def test_a_file_that_is_not_utf8_is_named_with_the_line(tmp_path: Path) -> None:
    path = tmp_path / "latin.jinja"
    path.write_bytes(b"line one\nGr\xfc\xdfe")
    with pytest.raises(TemplateError, match="not UTF-8") as caught:
        PromptTemplate.from_file(path)
    assert caught.value.line == 2


def test_mistakes_in_an_imported_file_name_that_file(tmp_path: Path) -> None:
    macros = tmp_path / "macros.jinja"
    macros.write_text("{% macro f() %}\n{{ gone }}\n{% endmacro %}", encoding="utf-8")
    main = tmp_path / "main.jinja"
    main.write_text("{% from 'macros.jinja' import f %}" + M % "{{ f() }}", encoding="utf-8")
    with pytest.raises(TemplateError, match="'gone' is undefined") as caught:
        PromptTemplate.from_file(main).render()
    assert (Path(caught.value.path).name, caught.value.line) == ("macros.jinja", 2)


def test_chunks_may_stand_in_imported_macros(tmp_path: Path) -> None:
    (tmp_path / "macros.jinja").write_text(
        "{% macro f(x) %}{% reuse 'm' %}{{ x }}{% endreuse %}{% endmacro %}", encoding="utf-8"
    )
    main = tmp_path / "main.jinja"
    main.write_text("{% from 'macros.jinja' import f %}" + M % "{{ f(1) }}", encoding="utf-8")
    chunks = list(PromptTemplate.from_file(main).render().chunks())
    assert [(c.id, c.text) for c in chunks] == [("m", "1")]


def test_a_template_survives_a_pickle_and_a_copy_with_what_it_imports(tmp_path: Path) -> None:
    (tmp_path / "m.jinja").write_text('{% macro m() %}{% reuse "m" %}M{% endreuse %}{% endmacro %}')
    file = tmp_path / "main.jinja"
    file.write_text(
        '{% import "m.jinja" as m %}{% message "user" %}{{ m.m() }}{{ say }}{% endmessage %}'
    )
    template = PromptTemplate.from_file(file, task="qa")
    wanted = template.render(say="Hi")
    for copied in (pickle.loads(pickle.dumps(template)), deepcopy(template)):
        assert copied.render(say="Hi") == wanted
        assert copied.chunks() == template.chunks()
        with pytest.raises(TemplateError, match=r"main\.jinja:1: .*'say' is undefined"):
            copied.render()
    runnable = TemplateRunnable(template=template)
    for twin in (pickle.loads(pickle.dumps(runnable)), deepcopy(runnable)):
        assert twin.invoke({"say": "Hi"}) == runnable.invoke({"say": "Hi"})


def test_a_template_cannot_read_files_outside_its_folder(tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("secret", encoding="utf-8")
    folder = tmp_path / "inner"
    folder.mkdir()
    (folder / "t.jinja").write_text(M % "{% include '../secret.txt' %}", encoding="utf-8")
    with pytest.raises(TemplateError, match="cannot find the template"):
        PromptTemplate.from_file(folder / "t.jinja").render()


def test_chunks_are_listed_without_rendering() -> None:
    source = (
        '{% message "system" %}\n{% reuse "a" %}{% endreuse %}{% endmessage %}\n'
        "{% for d in docs %}{% message role %}"
        '{% recompute "doc-" ~ loop.index ~ "!" %}{% endrecompute %}{% endmessage %}{% endfor %}'
    )
    assert PromptTemplate.from_string(source).chunks() == (
        TemplateChunk("a", Role.REUSE, "system", 2),
        TemplateChunk("doc-*!", Role.RECOMPUTE, "*", 3),
    )


def test_the_packaged_templates_are_known_by_name() -> None:
    assert set(template_names()) == {"reflexion", "reflexion_react", "memgpt", "swe_agent"}
    with pytest.raises(TemplateError, match="known: memgpt, reflexion, reflexion_react, swe_agent"):
        PromptTemplate.named("../reflexion")


VALUES: dict[str, dict[str, Any]] = {
    "reflexion": {
        "examples": [{"question": "Who?", "answer": "Ann"}],
        "reflections": ["look closer"],
        "paragraphs": [{"title": "T", "text": "body"}],
        "question": "Where?",
    },
    "memgpt": {
        "timestamp": "noon",
        "counters": {"messages in recall memory": 12},
        "facts": ["Ann likes tea."],
        "functions": [{"name": "recall", "description": "Search.", "parameters": {"q": "<x>"}}],
        "dialogue": [{"speaker": "Ann", "text": f"line {i}"} for i in range(20)],
        "question": "What does Ann like?",
    },
    "swe_agent": {
        "system": "You code.",
        "issue": "It breaks.",
        "history": [
            {"role": "assistant", "text": "ls"},
            {"role": "user", "text": "a\nb"},
            {"role": "assistant", "text": "cat a"},
            {"role": "tool", "text": "c"},
        ],
    },
}
CHUNKS: dict[str, list[str]] = {
    "reflexion": ["instruction", "examples", "reflections", "context", "cue"],
    "memgpt": ["instruction", "memory", "functions", "dialogue-1", "dialogue-2", "question"],
    "swe_agent": ["system", "issue", "step-1", "step-2", "step-3", "step-4", "cue"],
}


@pytest.mark.parametrize("name", CHUNKS)
def test_packaged_templates_have_their_documented_chunks(name: str) -> None:
    prompt = PromptTemplate.named(name).render(**VALUES[name])
    assert prompt.task == name
    assert [chunk.id for chunk in prompt.chunks()] == CHUNKS[name]


VISIBLE = {
    "reflexion": [
        "Question: Who?\nAnswer: Ann",
        "- look closer",
        "[1] T\nbody",
        "Question: Where?",
    ],
    "memgpt": ["messages in recall memory: 12", "Ann likes tea.", '"q": "<x>"', "Ann: line 19"],
    "swe_agent": ["You code.", "It breaks.", "cat a", "Output:\na\nb", "Output:\nc"],
}


@pytest.mark.parametrize("name", VISIBLE)
def test_packaged_templates_show_every_value(name: str) -> None:
    prompt = PromptTemplate.named(name).render(**VALUES[name])
    text = "".join(message.content for message in prompt.messages)
    assert [value for value in VISIBLE[name] if value not in text] == []


def test_reflexion_without_reflections_changes_only_that_chunk() -> None:
    template = PromptTemplate.named("reflexion")
    with_one = template.render(**VALUES["reflexion"])
    without = template.render(**{**VALUES["reflexion"], "reflections": []})
    pairs = zip(with_one.chunks(), without.chunks(), strict=True)
    assert [a.id for a, b in pairs if a.text != b.text] == ["reflections"]
    said = next(chunk.text for chunk in without.chunks() if chunk.id == "reflections")
    assert said == "This is your first attempt at the question.\n\n"


def test_swe_agent_elides_old_observations_and_keeps_roles_in_turn() -> None:
    template = PromptTemplate.named("swe_agent")
    prompt = template.render(**VALUES["swe_agent"], keep_observations=1)
    texts = {chunk.id: chunk.text for chunk in prompt.chunks()}
    assert texts["step-2"] == "Old output omitted (2 lines).\n"
    assert texts["step-4"] == "Output:\nc\n"
    roles = [message.role for message in prompt.messages]
    assert roles == ["system", "user", "assistant", "user", "assistant", "user"]


def test_swe_agent_keeps_the_ids_of_steps_when_older_ones_are_dropped() -> None:
    history = [{"id": 8, "role": "assistant", "text": "ls"}]
    prompt = PromptTemplate.named("swe_agent").render(system="", issue="i", history=history)
    assert [chunk.id for chunk in prompt.chunks()] == ["issue", "step-8", "cue"]
    assert [message.role for message in prompt.messages] == ["user", "assistant", "user"]
