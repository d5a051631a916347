"""What a conversion leaves behind: an adapter, or a whole checkpoint, and a card that says how.

In: a trained `Student`. Out: a folder. An adapter folder holds `cope.safetensors` (low-rank factors
and position embeddings) and `cope.json`; a checkpoint folder is what transformers loads once
`register_cope` was called, with `cope.json` beside it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from cacheslide_agents.errors import ModelError, ModelLoadError
from cacheslide_agents.training.binding import BaseTensor, check_base
from cacheslide_agents.training.evaluate import HeldOut
from cacheslide_agents.training.recipe import Recipe
from cacheslide_agents.training.student import Student
from torch_cacheslide.cope import cope_from_llama

WEIGHTS, CARD = "cope.safetensors", "cope.json"


@dataclass(frozen=True)
class Card:
    """How a conversion came about. `seconds` of training, evaluation not counted."""

    base: str
    recipe: Recipe
    tokens: int
    seconds: float
    threads: int
    held_out: Sequence[HeldOut]
    bound: Mapping[str, BaseTensor]

    def write(self, folder: Path) -> None:
        (folder / CARD).write_text(json.dumps({"format": 1, **asdict(self)}, indent=1) + "\n")

    @classmethod
    def read(cls, folder: Path) -> Card:
        """Raises `ModelLoadError` when the folder has no usable card."""
        try:
            fields = json.loads((folder / CARD).read_text(encoding="utf-8"))
            if fields.pop("format") != 1:
                raise ValueError("written by a newer version")
            recipe = fields["recipe"]
            fields["recipe"] = Recipe(**{**recipe, "lengths": tuple(recipe["lengths"])})
            fields["held_out"] = [HeldOut(**each) for each in fields["held_out"]]
            fields["bound"] = {
                name: BaseTensor(each["digest"], tuple(each["values"]))
                for name, each in fields["bound"].items()
            }
            return cls(**fields)
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise ModelLoadError(
                f"{folder / CARD} is not the card of a conversion: {error}"
            ) from error


def save_adapter(student: Student, card: Card, folder: Path) -> None:
    """Adapter in bfloat16. Raises `ModelError` rather than write a weight that is not finite."""
    tensors = {
        name: value.to(torch.bfloat16).contiguous() for name, value in student.adapter().items()
    }
    _check_finite(tensors)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / WEIGHTS)
    card.write(folder)


def save_checkpoint(model: Any, tokenizer: Any, card: Card, folder: Path) -> None:
    """The whole model, for transformers' `from_pretrained`. Raises as `save_adapter` does."""
    _check_finite(model.state_dict())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    card.write(folder)


def apply_adapter(base: Any, folder: Path, *, other_precision: bool = False) -> Any:
    """The CoPE model of `base` with the adapter in `folder`; `base` itself stays as it is.

    Raises `ModelLoadError` for another base model, and for missing or damaged files.
    """
    card = Card.read(folder)
    check_base(base, card.bound, f"the adapter {folder.name}", other_precision=other_precision)
    try:
        tensors = load_file(folder / WEIGHTS)
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{folder / WEIGHTS} cannot be read: {error}") from error
    model = cope_from_llama(base, card.recipe.npos)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in tensors.items():
            if name.endswith(".lora_A"):
                module = name.removesuffix(".lora_A")
                product = tensors[f"{module}.lora_B"].float() @ value.float()
                parameters[f"{module}.weight"] += product.to(parameters[f"{module}.weight"])
            elif not name.endswith(".lora_B"):
                parameters[name].copy_(value)
    return model.eval().requires_grad_(False)


def _check_finite(tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise ModelError(f"{name} is not finite: nothing was written; train again, slower")
