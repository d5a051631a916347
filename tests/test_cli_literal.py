"""What strangers wrote is shown as they wrote it: no markup, no emoji names, no format strings."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from cacheslide_agents.cli.bench import progress
from cacheslide_agents.cli.commands import app
from cacheslide_agents.cli.console import emit, notes, screen
from cacheslide_agents.errors import DataError

ODD = ["{x}", "[/x]", "[bold]b[/bold]", ":smile:"]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


@pytest.fixture
def fake(support: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> Any:
    found = support("fake_backend").FakeBackend()

    def load(name: str, **options: Any) -> Any:
        found.loaded_with = (name, options)
        return found

    monkeypatch.setattr("cacheslide_agents.cli.engine.load_backend", load)
    return found


@pytest.mark.parametrize("text", ODD)
@pytest.mark.parametrize("console", [notes, screen])
def test_consoles_show_text_as_it_is(
    text: str, console: Callable[[], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    console().print(text)
    assert "".join(capsys.readouterr()) == f"{text}\n"


@pytest.mark.parametrize("model", ODD)
@pytest.mark.usefixtures("fake")
def test_a_models_name_is_shown_as_it_is_while_it_loads(
    monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    result = run("generate", "Hi", "-m", model)
    assert result.exit_code == 0, result.output
    assert f"loading {model}" in result.stderr


@pytest.mark.parametrize("label", ODD)
def test_a_turns_name_is_shown_as_it_is_in_a_bar(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], label: str
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with progress(shown=True) as update:
        update(1, 2, label)
    assert label in capsys.readouterr().err


@pytest.mark.parametrize("name", ["smile", "x"])
def test_chunks_of_a_prompt_are_shown_as_they_are(tmp_path: Path, name: str) -> None:
    template = tmp_path / "t.jinja"
    template.write_text(
        f'{{% message "user" %}}{{% reuse ":{name}:" %}}a{{% endreuse %}}{{% endmessage %}}'
    )
    assert f":{name}:" in run("inspect", str(template)).stdout
    earlier, newer = (tmp_path / each for each in ("a.txt", "b.txt"))
    earlier.write_text(f"Some words in front.\n\n:{name}: it was.\n")
    newer.write_text(f"Some words in front.\n\n:{name}: it is.\n")
    assert f":{name}:" in run("why", str(earlier), str(newer)).stdout


@pytest.mark.parametrize("value", ["[" * 20_000, "1" * 5000], ids=["nested", "digits"])
def test_a_setting_that_is_no_json_we_can_read_is_text(fake: Any, value: str) -> None:
    assert run("generate", "Hi", "--set", f"x={value}").exit_code == 0
    assert fake.loaded_with[1]["x"] == value


def test_json_on_stdout_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(DataError, match="a figure is not finite"):
        emit({"kl": float("nan")})
    assert capsys.readouterr().out == ""
    emit({"kl": 0.5})
    assert json.loads(capsys.readouterr().out) == {"kl": 0.5}
