"""The conversion itself: steps over text, checkpoints on the way.

In: the original model, windows of its tokens, a recipe. Out: a trained `Student`. A run
that is ended at any moment goes on from its last checkpoint to the very same result (on the CPU).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from cacheslide_agents.errors import ModelError
from cacheslide_agents.training import checkpoint
from cacheslide_agents.training.checkpoint import Progress
from cacheslide_agents.training.distil import distil
from cacheslide_agents.training.material import Material, Window
from cacheslide_agents.training.recipe import PHASES, Recipe
from cacheslide_agents.training.student import Student
from cacheslide_agents.training.transfer import transfer
from cacheslide_agents.weights.fingerprint import file_digest
from torch_cacheslide.adapter import EMBEDDING, WEIGHTS, Adapter

Learn = Callable[[Any, Any, Window, float], float]
LEARN: dict[str, Learn] = {"transfer": transfer, "distil": distil}
CHECKPOINT = "checkpoint.safetensors"


@dataclass(frozen=True, slots=True)
class Report:
    """One step done. `loss`: mean relative error (transfer) or KL in nats (distil)."""

    phase: str
    step: int
    steps: int
    tokens: int
    loss: float
    seconds: float


class Conversion:
    """Drives one run; iterate it to the end."""

    def __init__(
        self,
        teacher: Any,
        material: Material,
        recipe: Recipe,
        folder: Path,
        *,
        base_digest: str,
        start: Adapter | None = None,
        checkpoint_every: int = 20,
    ) -> None:
        self._teacher, self.material, self._recipe = teacher, material, recipe
        self._path, self._every = folder / CHECKPOINT, checkpoint_every
        self.start, self.student = start, Student(teacher, recipe, start)
        started = [] if start is None else [file_digest(start.folder / WEIGHTS)]
        digest = recipe.digest([base_digest, *material.digests, *started])
        self._progress = Progress("transfer", 0, 0.0, 0, digest)

    @property
    def tokens(self) -> int:
        return self._progress.tokens

    @property
    def seconds(self) -> float:
        return self._progress.seconds

    def __iter__(self) -> Iterator[Report]:
        phases, saved = PHASES, None
        if self._path.exists():
            saved = checkpoint.load(self._path, self._progress.digest)
            saved.restore_weights(self.student.trained)
            self._progress = saved.progress
            phases = phases[phases.index(saved.progress.phase) :]
        for phase in phases:
            optimizer = self._optimizer(phase)
            if saved is not None and saved.progress.phase == phase:
                saved.restore_state(self.student.trained, optimizer)
            else:
                self._progress = replace(self._progress, phase=phase, step=0)
            yield from self._run(phase, optimizer)

    def _run(self, phase: str, optimizer: torch.optim.Optimizer) -> Iterator[Report]:
        steps = self.material.steps(phase)
        for step in range(self._progress.step, steps):
            started = perf_counter()
            loss, tokens = self._step(phase, step, steps, optimizer)
            self._progress = replace(
                self._progress,
                step=step + 1,
                seconds=self._progress.seconds + perf_counter() - started,
                tokens=self._progress.tokens + tokens,
            )
            if (step + 1) % self._every == 0 or step + 1 == steps:
                checkpoint.save(self._path, self._progress, self.student.trained, optimizer)
            yield Report(phase, step + 1, steps, self.tokens, loss, self.seconds)

    def _step(
        self, phase: str, step: int, steps: int, optimizer: torch.optim.Optimizer
    ) -> tuple[float, int]:
        recipe, loss, tokens = self._recipe, 0.0, 0
        optimizer.zero_grad(set_to_none=True)
        for window in self.material.windows(phase, step):
            share, here = 1.0 / recipe.sequences, window.to(self._teacher.device)
            loss += share * LEARN[phase](self._teacher, self.student.model, here, share)
            tokens += len(window.ids)
        norm = torch.nn.utils.clip_grad_norm_(self.student.trained.values(), recipe.clip)
        if not torch.isfinite(norm):
            raise ModelError(
                f"the gradient of {phase} step {step + 1} is not finite; lower the learning rates "
                "(the last checkpoint is whole)"
            )
        for group in optimizer.param_groups:
            group["lr"] = group["base_lr"] * recipe.rate(step, steps)
        optimizer.step()
        return loss, tokens

    def _optimizer(self, phase: str) -> torch.optim.Optimizer:
        recipe, trained = self._recipe, self.student.trained
        rate = recipe.learning_rate if phase == "transfer" else recipe.distil_rate
        positions = recipe.embedding_rate * rate / recipe.learning_rate
        groups = [
            {"params": [p for n, p in trained.items() if EMBEDDING not in n], "base_lr": rate},
            {"params": [p for n, p in trained.items() if EMBEDDING in n], "base_lr": positions},
        ]
        return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
