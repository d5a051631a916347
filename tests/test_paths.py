"""Paths as people write them: what they mean stays, and what means nothing is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner

from cacheslide_agents.backend import GenerationRequest, Sampling
from cacheslide_agents.cli.commands import app
from cacheslide_agents.errors import RequestError
from cacheslide_agents.pages import SlideStore
from cacheslide_agents.paths import expanded, short_name
from cacheslide_agents.prompt.template import PromptTemplate
from cacheslide_agents.prompt.tokens import load_tokenizer
from torch_cacheslide import TorchBackend
from torch_cacheslide.locate import locate


def test_a_path_means_what_it_meant_where_it_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/ann")
    assert expanded("a/b", "x") == tmp_path / "a" / "b"
    assert expanded(Path("."), "x") == tmp_path
    assert expanded("/a/../b", "x") == Path("/a/../b"), "links are followed when it is used"
    assert expanded("~/a", "x") == Path("/home/ann/a")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("", "x='' names no place"),
        ("a\0b", r"x='a\\x00b' is no path \(it holds a NUL\)"),
        ("\ud800", r"x='\\ud800' is no path"),
        ("~nobody-here/a", "x='~nobody-here/a' is no path"),
        (5, "x=5 is no path; give one as text"),
        (None, "x=None is no path"),
        (b"a", "x=b'a' is no path"),
    ],
)
def test_what_names_no_place_is_refused(path: Any, message: str) -> None:
    with pytest.raises(RequestError, match=f"^{message}"):
        expanded(path, "x")


def test_contexts_are_saved_where_the_path_was_given(
    tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = GenerationRequest(list(range(3, 60)), sampling=Sampling(max_tokens=1))
    (tmp_path / "elsewhere").mkdir()
    outcomes = []
    for folder in ("elsewhere", "."):
        monkeypatch.chdir(tmp_path)
        backend = TorchBackend(tiny_model, device="cpu", store_path="store")
        (*_, last) = backend.generate(request)
        assert last.receipt is not None
        outcomes.append(last.receipt.reused_tokens > 0)
        monkeypatch.chdir(folder)
        backend.close()
    assert outcomes == [False, True]


def test_a_page_store_of_its_own_stays_where_it_was_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, support: Callable[[str], ModuleType]
) -> None:
    world = support("page_world")
    monkeypatch.chdir(tmp_path)
    with SlideStore(1 << 20, "store", write_ahead=False) as store:
        monkeypatch.chdir("/")
        store.put(world.context_of(range(20), "one"), world.layers_of(20))
    with SlideStore(1 << 20, tmp_path / "store", read_only=True) as again:
        assert [context.session for context in again.contexts()] == ["one"]
    with pytest.raises(RequestError, match="path='' names no place"):
        SlideStore(1 << 20, "")


def test_an_unset_variable_never_means_the_store_in_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, support: Callable[[str], ModuleType]
) -> None:
    world = support("page_world")
    with SlideStore(1 << 20, tmp_path, write_ahead=False) as store:
        store.put(world.context_of(range(20), "one"), world.layers_of(20))
    monkeypatch.chdir(tmp_path)
    for command in (["ls"], ["stat"], ["verify"], ["gc"], ["rm", "--all"]):
        result = CliRunner().invoke(app, ["cache", *command, "--store", ""])
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr.startswith("error: --store='' names no place")
    result = CliRunner().invoke(app, ["cache", "rm", "--all", "--store", ".", "--json"])
    assert result.stdout.split() == ["{", '"removed":', "1", "}"]


@pytest.mark.parametrize(
    ("command", "option"),
    [
        (["serve", "model", "--store-path"], "--store-path"),
        (["chat", "--profiles"], "--profiles"),
        (["bench", "reflexion", "--data", ".", "--out"], "--out"),
        (["calibrate", "log.jsonl", "--out"], "--out"),
        (["train", "--text", "t", "--valid", "v", "--out"], "--out"),
    ],
)
def test_no_command_writes_to_a_place_without_a_name(command: list[str], option: str) -> None:
    result = CliRunner().invoke(app, [*command, ""])
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {option}='' names no place")


def test_a_template_finds_its_neighbours_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.jinja").write_text('{% include "b.jinja" %}')
    (tmp_path / "b.jinja").write_text('{% message "user" %}Hello{% endmessage %}')
    monkeypatch.chdir(tmp_path)
    template = PromptTemplate.from_file("a.jinja")
    monkeypatch.chdir("/")
    assert [chunk.text for chunk in template.render().chunks()] == ["Hello"]


def test_a_model_is_found_by_a_relative_path_by_its_name_and_by_a_link(
    tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CACHESLIDE_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    models = tmp_path / "home" / "models"
    models.mkdir(parents=True)
    (models / "mine").symlink_to(tiny_model)
    assert locate("mine") == models / "mine"
    assert locate("home/models/mine") == models / "mine"
    assert short_name("home/models/mine") == "mine"
    assert short_name("org/model") == "org/model"


def test_a_hub_id_stays_a_hub_id_for_the_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def ask(path: Any, **_: Any) -> None:
        asked.append(path)
        raise OSError("not here")

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", ask)
    with pytest.raises(Exception, match="cannot load a tokenizer from org/model: not here"):
        load_tokenizer("org/model")
    for place in ("/nowhere/model", "~/nowhere-at-all", Path("org/model")):
        with pytest.raises(Exception, match="no tokenizer folder at"):
            load_tokenizer(place)
    assert asked == ["org/model"]
