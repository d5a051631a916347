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
from shutil import rmtree
from typing import Any

import torch
from torch import Tensor

from cacheslide_agents.errors import ModelError
from cacheslide_agents.training.checkpoint import GO_ON
from cacheslide_agents.training.evaluate import HeldOut
from cacheslide_agents.training.output import published
from cacheslide_agents.training.recipe import Recipe
from cacheslide_agents.training.student import Student
from cacheslide_agents.weights.writing import save_tensors
from torch_cacheslide.adapter import CARD, FORMAT, WEIGHTS
from torch_cacheslide.binding import BaseTensor


@dataclass(frozen=True)
class Card:
    """How a conversion came about. `seconds` of training, evaluation not counted.

    `before`: recipe, tokens and seconds of the adapter that it started from, if it did. `requests`
    were there to train on; `too_long` ones were left out.
    """

    base: str
    dtype: str
    recipe: Recipe
    tokens: int
    seconds: float
    threads: int
    held_out: Sequence[HeldOut]
    bound: Mapping[str, BaseTensor]
    before: Mapping[str, Any] | None = None
    requests: int = 0
    too_long: int = 0

    def write(self, folder: Path) -> None:
        (folder / CARD).write_text(json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n")


def save_adapter(student: Student, card: Card, folder: Path) -> None:
    """Adapter in bfloat16; one that is there is replaced.

    Raises `ModelError` rather than write a weight that is not finite, and `DataError` where the
    folder cannot be written. Either way there is no half of it.
    """
    tensors = {
        name: value.to(torch.bfloat16).contiguous() for name, value in student.adapter().items()
    }
    _check_finite(tensors)
    with published(folder) as draft:
        save_tensors(tensors, draft / WEIGHTS, GO_ON)
        card.write(draft)
        rmtree(folder, ignore_errors=True)


def save_checkpoint(model: Any, tokenizer: Any, card: Card, folder: Path) -> None:
    """The whole model, for transformers' `from_pretrained`; one that is there is not replaced.

    Raises as `save_adapter` does.
    """
    _check_finite(model.state_dict())
    with published(folder) as draft:
        model.save_pretrained(draft)
        tokenizer.save_pretrained(draft)
        card.write(draft)


def _check_finite(tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise ModelError(f"{name} is not finite: nothing was written; train again, slower")
