"""Adapters that turn a rotary model into a CoPE one.

In: a folder with `cope.safetensors` (low-rank factors `<module>.lora_A` [rank, in] and `.lora_B`
[out, rank], position embeddings) and `cope.json` (which base it is bound to, and how it was
trained). Out: the converted model, in memory or as a folder that loads like any other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from cacheslide_agents.errors import ModelLoadError
from torch_cacheslide.binding import BaseTensor, check_base
from torch_cacheslide.cope import cope_from_llama
from torch_cacheslide.derived import derived
from torch_cacheslide.fingerprint import file_digest
from torch_cacheslide.pretrained import DTYPES, read_pretrained
from torch_cacheslide.quiet import quiet

WEIGHTS, CARD = "cope.safetensors", "cope.json"
FORMAT = 1


def is_adapter(folder: Path) -> bool:
    """Whether `folder` holds an adapter and no whole model."""
    return (folder / WEIGHTS).is_file() and not (folder / "config.json").exists()


@dataclass(frozen=True)
class Adapter:
    """`base` is the name of the model it was trained from; `bound`, that model's own tensors in
    the precision `dtype`."""

    folder: Path
    base: str
    dtype: torch.dtype
    npos: int
    bound: Mapping[str, BaseTensor]
    tensors: Mapping[str, Tensor]

    @classmethod
    def read(cls, folder: Path) -> Adapter:
        """Raises `ModelLoadError` for missing, damaged or newer files."""
        try:
            card = json.loads((folder / CARD).read_text(encoding="utf-8"))
            if card["format"] != FORMAT:
                raise ValueError(f"format {card['format']} is not {FORMAT}")
            bound = {
                name: BaseTensor(each["digest"], tuple(each["values"]))
                for name, each in card["bound"].items()
            }
            base, npos = str(card["base"]), int(card["recipe"]["npos"])
            dtype = DTYPES[card["dtype"]]
        except (OSError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise ModelLoadError(
                f"{folder / CARD} is not the card of a conversion: {error}"
            ) from error
        try:
            tensors = load_file(folder / WEIGHTS)
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(f"{folder / WEIGHTS} cannot be read: {error}") from error
        return cls(folder, base, dtype, npos, bound, tensors)

    def applied(self, base: Any, *, other_precision: bool = False) -> Any:
        """The CoPE model of `base`, which itself stays as it is.

        Raises `ModelLoadError` for another base, and, unless `other_precision`, for the same model
        in another precision.
        """
        check_base(base, self.bound, f"the adapter {self.folder}", other_precision=other_precision)
        model = cope_from_llama(base, self.npos)
        parameters = dict(model.named_parameters())
        try:
            with torch.no_grad():
                for name, value in self.tensors.items():
                    self._apply(name, value, parameters)
        except (KeyError, RuntimeError) as error:
            raise ModelLoadError(
                f"{self.folder / WEIGHTS} does not fit its base model ({error})"
            ) from error
        return model.eval().requires_grad_(False)

    def _apply(self, name: str, value: Tensor, parameters: Mapping[str, Tensor]) -> None:
        if name.endswith(".lora_A"):
            module = name.removesuffix(".lora_A")
            weight = parameters[f"{module}.weight"]
            weight += (self.tensors[f"{module}.lora_B"].float() @ value.float()).to(weight)
        elif not name.endswith(".lora_B"):
            parameters[name].copy_(value)


def merged(adapter: Adapter, base: Path, models: Path) -> Path:
    """The folder under `models` in which `base`, a model folder, has `adapter` added to it."""
    digest = file_digest(adapter.folder / WEIGHTS)[:12]
    target = models / f"{adapter.folder.name}-{digest}"
    return derived(target, adapter.folder, lambda folder: _merge(adapter, base, folder))


def _merge(adapter: Adapter, base: Path, folder: Path) -> None:
    trouble = f"the base model of the adapter {adapter.folder} cannot be loaded"
    model = read_pretrained(AutoModelForCausalLM, base, trouble, dtype=adapter.dtype)
    tokenizer = read_pretrained(AutoTokenizer, base, trouble)
    merged = adapter.applied(model)
    with quiet():
        merged.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
