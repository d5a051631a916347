"""Loading models: how they are found, what they compute, and the options."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, MistralConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from cacheslide_agents.errors import ModelLoadError, ModelNotFoundError
from torch_cacheslide.locate import cache_home
from torch_cacheslide.models import load_model


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache directory of the test's own, and no network."""
    monkeypatch.setenv("CACHESLIDE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path / "home"


@pytest.fixture
def tiny(support: Callable[[str], ModuleType]) -> Any:
    return support("tiny_models")


@pytest.fixture
def folder(tiny: Any, tmp_path: Path) -> Path:
    """A tiny Llama model."""
    written: Path = tiny.write_model(tmp_path / "tiny")
    return written


@pytest.mark.parametrize("kind", [LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config])
def test_a_loaded_model_computes_what_transformers_computes(
    tiny: Any, tmp_path: Path, kind: Any
) -> None:
    folder = tiny.write_model(tmp_path / "model", kind)
    loaded = load_model(folder)
    ids: Any = loaded.tokenizer("ab 12 \N{SNOWMAN}", return_tensors="pt")["input_ids"]
    reference = tiny.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        assert torch.equal(loaded.model(ids).logits, reference(ids).logits)


def test_a_loaded_model_is_frozen_and_in_the_dtype_and_attention_asked_for(folder: Path) -> None:
    loaded = load_model(folder, dtype="bfloat16", attn_implementation="eager")
    assert isinstance(loaded.model, PreTrainedModel)
    assert not loaded.model.training
    assert {p.dtype for p in loaded.model.parameters()} == {torch.bfloat16}
    assert not any(p.requires_grad for p in loaded.model.parameters())
    assert loaded.model.config._attn_implementation == "eager"
    assert loaded.model_id == "tiny"


def test_loading_writes_nothing_and_warns_of_nothing(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    capfd.readouterr()
    load_model(folder)
    assert capfd.readouterr() == ("", "")


def test_a_model_under_the_cache_directory_is_found_by_its_name(folder: Path, home: Path) -> None:
    (home / "models").mkdir(parents=True)
    folder.rename(home / "models" / "my-model")
    assert load_model("my-model").path == home / "models" / "my-model"


@pytest.mark.parametrize("name", ["", "nonesuch", "/no/such/folder", "org/nonesuch"])
def test_an_unknown_name_is_not_found_and_the_message_repeats_it(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match=name or "empty"):
        load_model(name)


def test_a_file_that_is_no_model_is_named(folder: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"config\.json is a file"):
        load_model(folder / "config.json")


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("CACHESLIDE_HOME", "/a/b", "/a/b"),
        ("XDG_CACHE_HOME", "/c", "/c/cacheslide"),
        ("HOME", "/d", "/d/.cache/cacheslide"),
    ],
)
def test_the_cache_directory_follows_the_environment(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, expected: str
) -> None:
    for name in ("CACHESLIDE_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, value)
    assert cache_home() == Path(expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int8"}, "dtype 'int8' is unknown"),
        ({"dtype": torch.int8}, "int8 is unknown"),
        ({"device": "quantum"}, "device 'quantum' is unknown"),
        ({"device": "meta"}, "device 'meta' is not handled"),
        ({"device": "cuda:99"}, r"'cuda:99' was asked for"),
        ({"attn_implementation": "nonesuch"}, "nonesuch"),
    ],
)
def test_an_option_that_does_not_exist_is_named(
    folder: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelLoadError, match=message):
        load_model(folder, **options)
