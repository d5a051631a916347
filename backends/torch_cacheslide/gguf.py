"""GGUF files turned into model folders, once, under the user's cache directory.

In: a `.gguf` file. Out: a folder with float32 safetensors (dequantisation is exact there), config,
tokenizer and chat template. Folders appear whole, by rename, whoever else converts at the time.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import shutil
from pathlib import Path
from tempfile import mkdtemp
from time import perf_counter
from typing import Any

import torch
import transformers
from filelock import FileLock
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from cacheslide_agents.errors import ModelLoadError
from torch_cacheslide.fingerprint import file_digest
from torch_cacheslide.quiet import quiet

MANIFEST = "conversion.json"
FORMAT = 1
_GGUF_STRING = 8
_logger = logging.getLogger(__name__)


def converted(gguf: Path, models: Path) -> Path:
    """The folder under `models` that `gguf` was, or now is, converted to.

    Raises `ModelLoadError` for a damaged file, missing packages or a folder that cannot be written.
    """
    target = models / f"{gguf.stem.lower()}-{file_digest(gguf)[:12]}"
    if _is_whole(target):
        return target
    try:
        models.mkdir(parents=True, exist_ok=True)
        with FileLock(models / f".{target.name}.lock"):
            if not _is_whole(target):
                _publish(gguf, target)
    except OSError as error:
        raise ModelLoadError(
            f"cannot write the converted form of {gguf} to {target} ({error}); free some space "
            "there, or let CACHESLIDE_HOME name a folder that can be written"
        ) from error
    return target


def _is_whole(folder: Path) -> bool:
    """Whether every file of the manifest is there with its size."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        sizes = manifest["files"] if manifest["format"] == FORMAT else {}
        return bool(sizes) and all(
            (folder / name).stat().st_size == size for name, size in sizes.items()
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _publish(gguf: Path, target: Path) -> None:
    """Convert beside `target` and rename; called by one process at a time."""
    began = perf_counter()
    _logger.warning("converting %s to %s, once; this takes up to a minute", gguf, target)
    for left_over in target.parent.glob(f".{target.name}.*.tmp"):
        shutil.rmtree(left_over, ignore_errors=True)
    folder = Path(mkdtemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent))
    try:
        _convert(gguf, folder)
        _seal(folder)
        shutil.rmtree(target, ignore_errors=True)
        folder.rename(target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    _logger.info("converted %s in %.0f s", gguf.name, perf_counter() - began)


def _convert(gguf: Path, folder: Path) -> None:
    where: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
    try:
        with quiet(stderr=True):
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **where)
            model = AutoModelForCausalLM.from_pretrained(
                gguf.parent,
                dtype=torch.float32,
                **_dequantised(),
                **where,
            )
    except ImportError as error:
        raise ModelLoadError(
            f"reading {gguf} needs a package that is not installed ({error}); "
            "pip install 'cacheslide-agents[torch]'"
        ) from error
    except Exception as error:
        raise ModelLoadError(
            f"{gguf} cannot be read as GGUF ({error}): it is truncated, damaged or of an unknown "
            "architecture; fetch it again"
        ) from error
    _restore_split(tokenizer, gguf)
    with quiet(stderr=True):
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _dequantised() -> dict[str, Any]:
    """The option that asks for dense weights; releases without `GgufConfig` always give them."""
    config = getattr(transformers, "GgufConfig", None)
    return {} if config is None else {"quantization_config": config(dequantize=True)}


def _restore_split(tokenizer: Any, gguf: Path) -> None:
    """Split digits as the model was trained to: transformers reads no `tokenizer.ggml.pre`.

    Without it "     12" becomes other whitespace tokens than in training: 3 % more tokens on
    numbered listings, and a higher loss.
    """
    if _string_field(gguf, "tokenizer.ggml.pre") == "smollm":
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )


def _string_field(gguf: Path, key: str) -> str | None:
    """A string of the header: key, uint32 value type, uint64 length, UTF-8; little-endian."""
    with gguf.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        at = data.find(len(key).to_bytes(8, "little") + key.encode())
        if at < 0:
            return None
        at += 8 + len(key)
        if int.from_bytes(data[at : at + 4], "little") != _GGUF_STRING:
            return None
        length = int.from_bytes(data[at + 4 : at + 12], "little")
        return data[at + 12 : at + 12 + length].decode("utf-8")


def _seal(folder: Path) -> None:
    """Write the manifest and force everything to disk, so that a rename publishes whole files."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    manifest = {"format": FORMAT, "files": {path.name: path.stat().st_size for path in files}}
    written = folder / MANIFEST
    written.write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    for path in (*files, written):
        with path.open("rb+") as stream:
            os.fsync(stream.fileno())
