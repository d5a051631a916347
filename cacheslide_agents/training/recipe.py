"""How a conversion is run: everything that its result depends on besides model and text.

In: numbers. Out: a frozen `Recipe`, whose digest binds a checkpoint to the run that wrote it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import cos, pi

from cacheslide_agents.errors import RequestError
from torch_cacheslide.adapter import MOST_POSITIONS

PHASES: tuple[str, ...] = ("transfer", "distil")


@dataclass(frozen=True, slots=True)
class Recipe:
    """Attention transfer over `transfer_tokens`, then end-to-end distillation over `distil_tokens`.

    Windows of text have the `lengths`, in tokens, in turn: train at the lengths you serve.
    `sequences` windows make one step. `adapter_rank` trains low-rank adapters of the attention
    projections instead of the projections. Learning rates rise over `warmup` of the steps of a
    phase and fall along a cosine to `floor` of themselves.

    Where there are requests of agents, those of up to `longest_request` tokens make up
    `request_share` of the tokens, and of what is learnt from one, its answer counts
    `answer_weight`, however short it is.
    """

    transfer_tokens: int = 600_000
    distil_tokens: int = 0
    lengths: tuple[int, ...] = (1024, 512, 2048)
    sequences: int = 1
    npos: int = 64
    learning_rate: float = 5e-4
    distil_rate: float = 5e-5
    embedding_rate: float = 1e-2
    adapter_rank: int | None = None
    warmup: float = 0.03
    floor: float = 0.01
    clip: float = 1.0
    seed: int = 0
    request_share: float = 0.67
    longest_request: int = 4096
    answer_weight: float = 0.5

    def __post_init__(self) -> None:
        rate = "above 0 and below 1"
        checks = {
            "transfer_tokens": (self.transfer_tokens >= 0, "at least 0"),
            "distil_tokens": (self.distil_tokens >= 0, "at least 0"),
            "lengths": (min(self.lengths, default=0) >= 16, "one or more, each at least 16"),
            "sequences": (self.sequences >= 1, "at least 1"),
            "npos": (2 <= self.npos <= MOST_POSITIONS, f"from 2 to {MOST_POSITIONS}"),
            "learning_rate": (0.0 < self.learning_rate < 1.0, rate),
            "distil_rate": (0.0 < self.distil_rate < 1.0, rate),
            "embedding_rate": (0.0 < self.embedding_rate < 1.0, rate),
            "adapter_rank": (self.adapter_rank is None or self.adapter_rank >= 1, "at least 1"),
            "warmup": (0.0 <= self.warmup < 1.0, "at least 0 and below 1"),
            "floor": (0.0 <= self.floor <= 1.0, "from 0 to 1"),
            "clip": (self.clip > 0.0, "above 0"),
            "seed": (self.seed >= 0, "at least 0"),
            "request_share": (0.0 < self.request_share <= 1.0, "above 0 and at most 1"),
            "longest_request": (self.longest_request >= 16, "at least 16"),
            "answer_weight": (0.0 < self.answer_weight < 1.0, rate),
        }
        for name, (holds, wanted) in checks.items():
            if not holds:
                raise RequestError(f"Recipe({name}={getattr(self, name)!r}) must be {wanted}")
        if not self.transfer_tokens + self.distil_tokens:
            raise RequestError(
                "Recipe(transfer_tokens=0, distil_tokens=0) trains nothing; give one of them tokens"
            )

    def tokens(self, phase: str) -> int:
        return self.transfer_tokens if phase == "transfer" else self.distil_tokens

    def rate(self, step: int, steps: int) -> float:
        """What a phase's learning rates are multiplied by at `step` of `steps`."""
        rising = self.warmup * steps
        if step < rising:
            return (step + 1) / (rising + 1)
        done = (step - rising) / max(1.0, steps - rising)
        return self.floor + (1.0 - self.floor) * 0.5 * (1.0 + cos(pi * done))

    def digest(self, *bound_to: Sequence[str]) -> str:
        """Of this recipe and of what else a run depends on."""
        text = json.dumps([asdict(self), *bound_to], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()
