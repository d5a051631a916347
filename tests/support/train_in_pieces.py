"""Runs a conversion in child processes that are killed at random steps, until one gets through.

Arguments: model folder, text file, output folder, kills, seed. Prints how often it killed.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path

import torch

from cacheslide_agents.training.recipe import Recipe
from cacheslide_agents.training.run import Job, train
from torch_cacheslide.models import load_model

RECIPE = Recipe(
    transfer_tokens=32 * 30, distil_tokens=32 * 12, lengths=(16, 48), npos=8, adapter_rank=None
)


def job(model: Path, text: Path, out: Path) -> Job:
    return Job(
        str(model), [text], [text], out, RECIPE, eval_lengths=(32,), windows=2, checkpoint_every=3
    )


def main() -> None:
    model, text, out = (Path(each) for each in sys.argv[1:4])
    load_model(model)  # imports what the children would each import
    kills, chance = int(sys.argv[4]), random.Random(int(sys.argv[5]))
    killed = 0
    while True:
        steps = chance.randint(1, 5) if killed < kills else 10**9
        child = os.fork()
        if child == 0:
            _run(job(model, text, out), steps)
        if not os.WIFSIGNALED(os.waitpid(child, 0)[1]):
            break
        killed += 1
    print(killed)


def _run(work: Job, steps: int) -> None:
    left = [steps]

    def count(_: object) -> None:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    train(work, count)
    os._exit(0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
