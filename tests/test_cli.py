"""The command line on a backend without a model: what it asks, prints and returns."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner, Result

from cacheslide_agents.backend import Backend, Sampling
from cacheslide_agents.cli.commands import app
from cacheslide_agents.errors import ModelNotFoundError

if TYPE_CHECKING:
    from tests.support.fake_backend import FakeBackend

TEMPLATE = (
    '{% message "user" %}{% reuse "text" %}{{ text }}{% endreuse %}'
    '{% recompute "cue" %} Why?{% endrecompute %}{% endmessage %}'
)


@pytest.fixture
def backend(support: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> FakeBackend:
    """What every command loads."""
    fake: FakeBackend = support("fake_backend").FakeBackend(reused=7)

    def load(name: str, **options: Any) -> Backend:
        fake.loaded_with = (name, options)
        return fake

    monkeypatch.setattr("cacheslide_agents.cli.engine.load_backend", load)
    return fake


@pytest.fixture
def template(tmp_path: Path) -> str:
    path = tmp_path / "why.jinja"
    path.write_text(TEMPLATE, encoding="utf-8")
    return str(path)


def run(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, arguments, input=stdin)


def test_generate_streams_the_answer_to_stdout_and_the_receipt_to_stderr(
    backend: FakeBackend,
) -> None:
    result = run("generate", "Say these words")
    assert result.exit_code == 0
    assert result.stdout == "Say these words\n"
    assert result.stderr == (
        f"fake: partial, 7 of {len(backend.requests[0].prompt_ids)} prompt tokens reused, "
        f"{1 - 7 / len(backend.requests[0].prompt_ids):.1%} computed, "
        "first token after 0.250 s\n"
    )
    assert backend.closed


def test_generate_as_json_prints_one_object_with_the_receipt(backend: FakeBackend) -> None:
    result = run("generate", "Say these words", "--json")
    answer = json.loads(result.stdout)
    assert (answer["model"], answer["text"]) == ("fake-model", "Say these words")
    assert answer["finish_reason"] == "stop"
    assert answer["output_tokens"] == len(b"Say these words")
    assert answer["receipt"]["request_id"] == backend.requests[0].request_id


def test_options_reach_backend_and_request(backend: FakeBackend) -> None:
    options = "--model m --backend b --device cpu --threads 1 --policy prefix --max-tokens 3"
    sampling = "--temperature 0.5 --top-p 0.9 --top-k 4 --seed 5 --stop A --stop B --min-p 0.1"
    search = "--repetition-penalty 1.2 --beams 2 --length-penalty 0.5"
    given = [*options.split(), *sampling.split(), *search.split()]
    assert run("generate", "Hi", *given).exit_code == 0
    assert backend.loaded_with == ("b", {"model": "m", "device": "cpu", "threads": 1})
    (request,) = backend.requests
    assert request.policy is not None
    assert request.policy.name == "prefix"
    assert request.sampling == Sampling(
        max_tokens=3,
        temperature=0.5,
        top_p=0.9,
        top_k=4,
        min_p=0.1,
        repetition_penalty=1.2,
        num_beams=2,
        length_penalty=0.5,
        seed=5,
        stop=("A", "B"),
    )


def test_prompt_may_come_from_stdin_and_have_a_system_message(backend: FakeBackend) -> None:
    result = run("generate", "-", "--system", "Be brief.", stdin="From afar")
    assert result.stdout == "From afar\n"
    assert backend.prompt(backend.requests[0]).startswith("<|im_start|>system\nBe brief.<|im_end|>")


def test_template_file_is_rendered_with_values_from_file_or_stdin(
    backend: FakeBackend, template: str, tmp_path: Path
) -> None:
    values = json.dumps({"text": "The sky is blue."})
    (tmp_path / "values.json").write_text(values, encoding="utf-8")
    from_file = run("generate", "--template", template, "--values", str(tmp_path / "values.json"))
    from_stdin = run("generate", "--template", template, "--values", "-", stdin=values)
    assert from_file.stdout == from_stdin.stdout == "The sky is blue. Why?\n"
    assert [span.id for span in backend.requests[0].spans] == ["text", "cue", "generation-prompt"]
    assert backend.requests[0].task == "why"


def test_chat_sends_the_whole_conversation_each_turn(backend: FakeBackend) -> None:
    result = run("chat", stdin="First words\n\nSecond\n")
    assert result.exit_code == 0
    assert result.stdout == "First words\nSecond\n"
    assert len(result.stderr.splitlines()) == 2
    assert backend.prompt(backend.requests[1]) == (
        "<|im_start|>user\nFirst words<|im_end|>\n<|im_start|>assistant\nFirst words<|im_end|>\n"
        "<|im_start|>user\nSecond<|im_end|>\n<|im_start|>assistant\n"
    )


def test_chat_as_json_prints_the_conversation_at_the_end(backend: FakeBackend) -> None:
    turns = json.loads(run("chat", "--json", stdin="One\nTwo\n").stdout)["turns"]
    assert [(turn["user"], turn["text"]) for turn in turns] == [("One", "One"), ("Two", "Two")]
    assert [turn["receipt"]["reused_tokens"] for turn in turns] == [7, 7]


def test_other_options_of_a_backend_are_set_by_name(backend: FakeBackend) -> None:
    settings = ("store_bytes=1024", "eviction=lru", "enforce_eager=true")
    run("generate", "Hi", *(part for each in settings for part in ("--set", each)))
    assert backend.loaded_with is not None
    named = {"store_bytes": 1024, "eviction": "lru", "enforce_eager": True}
    assert backend.loaded_with[1] == {"model": "smollm2-135m", **named}


def test_inspect_lists_the_chunks_of_a_packaged_template_without_values() -> None:
    chunks = json.loads(run("inspect", "reflexion", "--json").stdout)["chunks"]
    assert [(chunk["id"], chunk["role"]) for chunk in chunks] == [
        ("instruction", "reuse"),
        ("examples", "reuse"),
        ("reflections", "recompute"),
        ("context", "reuse"),
        ("cue", "recompute"),
    ]
    table = run("inspect", "reflexion")
    assert all(chunk["id"] in table.stdout for chunk in chunks)


def test_inspect_with_values_counts_tokens_and_says_how(
    template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def offline(text: str, encoding: str, fallback: str | None = None) -> int:
        from cacheslide_agents.errors import TokenizerError

        asked.append(text)
        if fallback is None:
            raise TokenizerError("cannot fetch")
        return len(text.encode()) // 4

    monkeypatch.setattr("cacheslide_agents.cli.inspect.count_tokens", offline)
    values = json.dumps({"text": "x" * 40})
    found = json.loads(run("inspect", template, "--values", "-", "--json", stdin=values).stdout)
    assert found["tokenizer"].startswith("estimate")
    assert [chunk["tokens"] for chunk in found["chunks"]] == [10, 1]
    assert found["prompt_tokens"] == 11
    assert len(asked) == 3


@pytest.mark.parametrize(
    ("arguments", "stdin", "message"),
    [
        (["generate"], None, "error: give either a PROMPT"),
        (["generate", "Hi", "--template", "reflexion"], None, "error: give either a PROMPT"),
        (["generate", "Hi", "--values", "-"], "{}", "error: --values goes with --template"),
        (["generate", "Hi", "--policy", "best"], None, "error: no policy is named 'best'"),
        (["generate", "Hi", "--top-p", "0"], None, "error: top_p=0.0 must be above 0"),
        (["generate", "Hi", "--set", "eager"], None, "error: --set 'eager' must be NAME=VALUE"),
        (["generate", "Hi", "--set", "model=x"], None, "error: --set model=... has an option"),
        (["check", "--set", "dtype=x"], None, "error: --set dtype=... has an option"),
        (["generate", "--template", "none"], None, "error: none: no packaged template"),
        (["generate", "--template", "./none.jinja"], None, "error: none.jinja: cannot read"),
        (["generate", "--template", "reflexion"], None, "is undefined"),
        (["inspect", "reflexion", "--values", "-"], "[1]", "values must be a JSON object"),
        (["inspect", "reflexion", "--values", "-"], "{", "error: -: values are not JSON"),
        (["inspect", "reflexion", "--values", "none.json"], None, "No such file"),
        (["inspect", "reflexion", "--model", "smollm2-135m"], None, "give its --values too"),
        (["bench", "--data", "."], None, "error: give either --task or --study"),
        (["bench", "--data", ".", "--task", "chess"], None, "no task is named 'chess'"),
        (["bench", "--data", ".", "--study", "x"], None, "no study is named 'x'"),
        (["bench", "--data", ".", "--task", "memgpt", "--policies", "a"], None, "named 'a'"),
        (["bench", "--data", "none", "--task", "memgpt"], None, "error: none/msc/dev.jsonl"),
        (["report", "none.json"], None, "error: none.json cannot be read"),
        (["report", "none.json", "--page", "--json"], None, "error: --page stands alone"),
        (["demo", "--question", "999"], None, "error: there is no sample question 999"),
    ],
)
def test_bad_input_is_one_line_on_stderr_and_exit_code_2(
    backend: FakeBackend, arguments: list[str], stdin: str | None, message: str
) -> None:
    result = run(*arguments, stdin=stdin)
    assert result.exit_code == 2
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert result.stdout == ""
    assert backend.requests == []


@pytest.mark.parametrize("arguments", [["generate", "Hi", "--max-tokens", "0"], ["fly"], ["bench"]])
def test_usage_errors_have_exit_code_2(arguments: list[str]) -> None:
    assert run(*arguments).exit_code == 2


def test_error_of_many_lines_is_still_one_line(
    backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(name: str, **options: Any) -> Backend:
        raise ModelNotFoundError("no model\n  called that")

    monkeypatch.setattr("cacheslide_agents.cli.engine.load_backend", load)
    result = run("generate", "Hi")
    assert (result.exit_code, result.stderr) == (2, "error: no model called that\n")


def test_report_refuses_a_figure_it_cannot_draw(tmp_path: Path) -> None:
    point = {
        "task": "t",
        "policy": "p",
        "selector": "s",
        "fraction": 0.1,
        "compute_fraction": 0.2,
        "kl_mean": 0.1,
    }
    study = tmp_path / "study.json"
    study.write_text(json.dumps({"schema": 1, "study": "frontier", "points": [point]}))
    drawn = run("report", str(study), "--plot", str(tmp_path / "a.png"))
    assert drawn.exit_code == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    for place in (tmp_path / "a.nope", tmp_path / "missing" / "a.png"):
        result = run("report", str(study), "--plot", str(place))
        assert result.exit_code == 2
        assert "cannot be drawn" in result.stderr
