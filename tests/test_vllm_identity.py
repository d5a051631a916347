"""What tells engines apart: config alone, or weights where contexts outlive the engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from cacheslide_agents.errors import StoreError

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own, at its import


@pytest.fixture
def identity(support: Callable[[str], ModuleType]) -> Any:
    missing = support("vllm_engines").MISSING
    if missing:
        pytest.skip(missing)
    from vllm_cacheslide import identity

    return identity


def model(folder: Path, fill: float = 1.0) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}), encoding="utf-8")
    save_file({"weight": torch.full((4, 4), fill)}, folder / "model.safetensors")
    return folder


def engine(name: str, store_path: str | None, cache: Path | None = None, **load: Any) -> Any:
    """What is read of vLLM's config."""
    config = SimpleNamespace(to_dict=lambda: {"model_type": "llama"})
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model=name, revision=None, dtype=torch.float32, quantization=None, hf_config=config
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        load_config=SimpleNamespace(**{"load_format": "auto", "download_dir": cache, **load}),
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config={"store_path": store_path}),
    )


def test_other_weights_in_the_same_folder_are_another_model(identity: Any, tmp_path: Path) -> None:
    name = str(model(tmp_path / "model"))
    first = identity.fingerprint(engine(name, "store"))
    assert identity.fingerprint(engine(name, "store")) == first
    assert identity.fingerprint(engine(name, None)) != first
    model(tmp_path / "model", 2.0)
    assert identity.fingerprint(engine(name, "store")) != first


def test_weights_of_a_hub_id_are_read_where_they_were_loaded_to(
    identity: Any, tmp_path: Path
) -> None:
    hub = tmp_path / "models--team--tiny"
    (hub / "refs").mkdir(parents=True)
    (hub / "refs" / "main").write_text("c0ffee", encoding="ascii")
    (hub / "snapshots").mkdir()
    found = []
    for fill in (1.0, 2.0):
        model(hub / "snapshots" / "c0ffee", fill)
        found.append(identity.fingerprint(engine("team/tiny", "store", tmp_path)))
    assert found[0] != found[1]


@pytest.mark.parametrize("load_format", ["dummy", "pt", "sharded_state"])
def test_weights_that_are_not_those_of_the_files_keep_no_contexts(
    identity: Any, tmp_path: Path, load_format: str
) -> None:
    name = str(model(tmp_path / "model"))
    with pytest.raises(StoreError, match=f"load_format='{load_format}'.*leave store_path out"):
        identity.fingerprint(engine(name, "store", load_format=load_format))
    assert identity.fingerprint(engine(name, None, load_format=load_format))


def test_pickled_and_missing_weights_keep_no_contexts(identity: Any, tmp_path: Path) -> None:
    folder = model(tmp_path / "model")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(StoreError, match=r"pickled weights only.*leave store_path out"):
        identity.fingerprint(engine(str(folder), "store"))
    with pytest.raises(StoreError, match="team/tiny is no folder here"):
        identity.fingerprint(engine("team/tiny", "store", tmp_path))


def test_a_store_folder_for_weights_that_cannot_be_read_is_refused_before_the_engine_starts(
    identity: Any, tmp_path: Path
) -> None:
    from vllm_cacheslide.launch import checked, engine_args

    sound, pickled = str(model(tmp_path / "sound")), model(tmp_path / "pickled")
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    kept = {"store_path": str(tmp_path / "store")}
    assert checked(sound, kept).settings.store_path == kept["store_path"]
    assert checked(str(pickled), {}).model == str(pickled)
    with pytest.raises(StoreError, match="pickled weights only"):
        checked(str(pickled), kept)
    with pytest.raises(StoreError, match="load_format='dummy'"):
        engine_args(sound, kept, {"load_format": "dummy"})
