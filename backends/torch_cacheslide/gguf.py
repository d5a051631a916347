"""GGUF files turned into model folders.

In: a `.gguf` file. Out: a folder with float32 safetensors (dequantisation is exact there), config,
tokenizer and chat template.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from cacheslide_agents.errors import ModelLoadError, install_hint
from cacheslide_agents.weights.fingerprint import file_digest
from torch_cacheslide.derived import derived
from torch_cacheslide.quiet import quiet


def converted(gguf: Path, models: Path) -> Path:
    """The folder under `models` that `gguf` was, or now is, converted to.

    Raises `ModelLoadError` for a damaged file, missing packages or a folder that cannot be written.
    """
    target = models / f"{gguf.stem.lower()}-{file_digest(gguf)[:12]}"
    return derived(target, gguf, lambda folder: _convert(gguf, folder))


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
            f"{install_hint('torch')}"
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
    """A string of the header; it takes seconds, for the whole of it is read."""
    from gguf import GGUFReader, GGUFValueType

    field = GGUFReader(gguf).get_field(key)
    if field is None or field.types != [GGUFValueType.STRING]:
        return None
    return bytes(field.parts[field.data[0]]).decode("utf-8")
