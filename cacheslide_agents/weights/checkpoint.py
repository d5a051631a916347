"""The safetensors files of a model folder, read without loading a tensor.

In: a folder. Out: its weight files and, per tensor, the dtype, shape and place of its bytes. A
folder that cannot be a whole model is a `ModelLoadError` that names the file and the mend.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cacheslide_agents.errors import ModelLoadError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor: bytes [start, stop) of `file`, counted from the file's first byte."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def read_config(folder: Path) -> dict[str, Any]:
    """`config.json` of `folder` as it stands."""
    path = folder / "config.json"
    if not path.is_file():
        raise ModelLoadError(
            f"{folder} has no config.json; a model folder holds config.json, *.safetensors and the "
            "tokenizer's files, as save_pretrained writes them"
        )
    return _read_json(path)


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The safetensors files that make up the model, in name order."""
    index = folder / INDEX_FILE
    if index.is_file():
        names = _mapped_names(index)
        files = tuple(folder / name for name in names)
    else:
        files = (folder / SINGLE_FILE,)
    missing = [file.name for file in files if not file.is_file()]
    if missing or not files:
        raise ModelLoadError(_no_weights(folder, missing, indexed=index.is_file()))
    return files


def _mapped_names(index: Path) -> list[str]:
    """The file names that an index gives its tensors, each once."""
    files = _read_json(index).get("weight_map", {})
    if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
        raise ModelLoadError(f"{index}: its weight_map gives no file names; fetch it again")
    return sorted(set(files.values()))


def tensor_entries(folder: Path) -> dict[str, TensorEntry]:
    """Every tensor of the model in name order; files shorter than their headers say are refused."""
    entries: dict[str, TensorEntry] = {}
    for file in weight_files(folder):
        entries.update(_file_entries(file))
    return dict(sorted(entries.items()))


def _file_entries(file: Path) -> dict[str, TensorEntry]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
        raw = stream.read(length) if length <= _MAX_HEADER_BYTES else b""
    base = _LENGTH_BYTES + length
    try:
        header = json.loads(raw)
        entries = {
            name: TensorEntry(
                file,
                tensor["dtype"],
                tuple(tensor["shape"]),
                *_place(tensor["data_offsets"], base),
            )
            for name, tensor in header.items()
            if name != "__metadata__"
        }
    except (
        ValueError,
        KeyError,
        TypeError,
        IndexError,
        AttributeError,
        RecursionError,
    ) as error:
        raise ModelLoadError(
            f"{file} is not a safetensors file, or its head is damaged ({error}); fetch it again"
        ) from error
    end = max((entry.stop for entry in entries.values()), default=base)
    if size != end:
        raise ModelLoadError(
            f"{file} has {size} bytes but its header speaks of {end}: it is truncated or damaged; "
            "fetch it again"
        )
    return entries


def _place(offsets: Any, base: int) -> tuple[int, int]:
    start, stop = offsets
    if type(start) is not int or type(stop) is not int or not 0 <= start <= stop:
        raise ValueError(f"a tensor has the place {offsets}")
    return base + start, base + stop


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} cannot be read as JSON ({error}); fetch it again") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path} holds no JSON object; fetch it again")
    return content


def _no_weights(folder: Path, missing: list[str], *, indexed: bool) -> str:
    if indexed:
        names = ", ".join(missing) or "no file at all"
        return f"{folder}: {INDEX_FILE} names files that are not there ({names}); fetch them again"
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
        return (
            f"{folder} holds pickled weights only, which are code and are not loaded; rewrite them "
            "as safetensors (model.save_pretrained of transformers does)"
        )
    return f"{folder} has no weights: neither {SINGLE_FILE} nor {INDEX_FILE} is there"
