"""Where an interrupted conversion goes on.

In: trained tensors, the optimizer's state, the step. Out: one safetensors file, replaced as a
whole, from which a run continues bit for bit. No pickle.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from cacheslide_agents.errors import DataError
from cacheslide_agents.weights.writing import save_tensors, writing

FORMAT = "1"
GO_ON = "free some space there, or let it be written to, and run it again to go on"
"""The mend for what a run cannot write, since its last checkpoint is whole."""

_DAMAGED = (SafetensorError, OSError, KeyError, RecursionError, TypeError, ValueError)


@dataclass(frozen=True)
class Progress:
    """`phase` and `step` that come next; `seconds` and `tokens` so far; the run's `digest`."""

    phase: str
    step: int
    seconds: float
    tokens: int
    digest: str


def save(
    path: Path,
    progress: Progress,
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
) -> None:
    """Raises `DataError` where it cannot be written; the last checkpoint stays whole."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        tensors[f"weight/{name}"] = parameter.detach().cpu().contiguous()
        for field, value in optimizer.state[parameter].items():
            tensors[f"{field}/{name}"] = torch.as_tensor(value).cpu().contiguous()
    header = {"format": FORMAT, "progress": json.dumps(vars(progress))}
    whole = path.with_name(path.name + ".part")
    save_tensors(tensors, whole, GO_ON, header)
    with writing(path, GO_ON):
        with whole.open("rb") as file:
            os.fsync(file.fileno())
        whole.replace(path)


@dataclass(frozen=True)
class Saved:
    """What a checkpoint holds."""

    progress: Progress
    tensors: Mapping[str, Tensor]

    def restore_weights(self, parameters: Mapping[str, nn.Parameter]) -> None:
        for name, parameter in parameters.items():
            parameter.data.copy_(self.tensors[f"weight/{name}"])

    def restore_state(
        self, parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer
    ) -> None:
        for key, value in self.tensors.items():
            field, _, name = key.partition("/")
            if field != "weight":
                parameter = parameters[name]
                placed = value.to(parameter.device) if value.dim() else value
                optimizer.state[parameter][field] = placed


def load(path: Path, digest: str) -> Saved:
    """Raises `DataError` for a damaged file and for the checkpoint of another run."""
    try:
        with safe_open(path, framework="pt") as file:
            progress = Progress(**json.loads(file.metadata()["progress"]))
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except _DAMAGED as error:
        raise DataError(f"{path} cannot be read ({error}); delete it to start anew") from error
    if progress.digest != digest:
        raise DataError(
            f"{path} belongs to a run with another recipe, model or text; use another output "
            "folder, or delete it to start anew"
        )
    return Saved(progress, tensors)
