"""Which base model an adapter belongs to, told by the base model's own tensors.

In: a model. Out: a digest and a few values of every attention tensor; later, whether another model
is the same, the same in another precision, or a different one.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cacheslide_agents.errors import ModelLoadError

SAMPLES = 8
TOLERANCE = 0.01
"""Largest relative difference that rounding to bfloat16 explains, with room."""
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BaseTensor:
    """`digest`: SHA-256 of the tensor's bytes. `values`: evenly spaced elements."""

    digest: str
    values: tuple[float, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> BaseTensor:
        flat = tensor.detach().cpu().contiguous().flatten()
        digest = hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest()
        places = torch.linspace(0, len(flat) - 1, SAMPLES).long()
        return cls(digest, tuple(flat[places].float().tolist()))

    def resembles(self, other: BaseTensor) -> bool:
        if len(self.values) != len(other.values):
            return False
        pairs = zip(self.values, other.values, strict=True)
        return all(abs(a - b) <= TOLERANCE * max(abs(a), abs(b)) for a, b in pairs)


def bind(model: Any) -> dict[str, BaseTensor]:
    """What identifies `model` as the base of a conversion: its attention tensors."""
    return {
        name: BaseTensor.of(tensor)
        for name, tensor in model.state_dict().items()
        if ".self_attn." in name and name.endswith("weight")
    }


def check_base(
    model: Any, wanted: Mapping[str, BaseTensor], what: str, *, other_precision: bool = False
) -> None:
    """Raises `ModelLoadError` unless `model` is the base that `what` was trained on.

    The same model in another precision is accepted, with a warning, if `other_precision` is set.
    """
    found = bind(model)
    if found == dict(wanted):
        return
    same_names = found.keys() == wanted.keys()
    if not same_names or not all(found[name].resembles(wanted[name]) for name in wanted):
        raise ModelLoadError(f"{what} was trained on another model than {model.name_or_path!r}")
    if not other_precision:
        raise ModelLoadError(
            f"{what} was trained on {model.name_or_path!r} in another precision; load the base in "
            "that precision, or allow it with other_precision=True"
        )
    log.warning("%s is applied to its base model in another precision", what)
