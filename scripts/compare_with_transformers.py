"""Dense prefill and decode against transformers' `generate`: same weights, dtype and threads.

In: prompt length, new tokens, pairs. Out: JSON with paired ratios ours / transformers (below 1:
ours is faster) and whether the greedy tokens were equal. They run in turn; who is first alternates.
"""

from __future__ import annotations

import argparse
import json
from statistics import median
from time import perf_counter
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from cacheslide_agents.backend import GenerationRequest, Sampling
from cacheslide_agents.policies import Recompute
from torch_cacheslide import TorchBackend


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    given = parser.parse_args()
    backend = TorchBackend(given.model, device="cpu", threads=given.threads)
    reference: Any = AutoModelForCausalLM.from_pretrained(backend.path, attn_implementation="sdpa")
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(100, backend.tokenizer.vocab_size, (given.tokens,), generator=generator)
    ratios: dict[str, list[float]] = {"prefill": [], "decode": []}
    equal = True
    for pair in range(-1, given.pairs):  # the first one only warms up
        runs = [lambda: ours(backend, ids, given.new_tokens), lambda: theirs(reference, ids, given)]
        timed = [run() for run in (runs if pair % 2 else reversed(runs))]
        mine, other = timed if pair % 2 else reversed(timed)
        equal &= mine[2] == other[2]
        if pair >= 0:
            ratios["prefill"].append(mine[0] / other[0])
            ratios["decode"].append(mine[1] / other[1])
    backend.close()
    figures = {
        name: {"median": median(r), "min": min(r), "max": max(r)} for name, r in ratios.items()
    }
    print(json.dumps({**vars(given), "tokens_equal": equal, **figures}, indent=1))


def ours(backend: TorchBackend, ids: torch.Tensor, new: int) -> tuple[float, float, list[int]]:
    request = GenerationRequest(
        ids.tolist(),
        sampling=Sampling(max_tokens=new, ignore_eos=True),
        policy=Recompute(),
        retain=False,
    )
    begin = perf_counter()
    times, tokens = [], []
    for chunk in backend.generate(request):
        times.append(perf_counter() - begin)
        tokens += chunk.token_ids
    return times[0], times[-1] - times[0], tokens


def theirs(model: Any, ids: torch.Tensor, given: Any) -> tuple[float, float, list[int]]:
    """Seconds to the first token, seconds for the others, the tokens."""
    options = {"do_sample": False, "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}
    timer = FirstToken()
    begin = perf_counter()
    output = model.generate(
        ids[None],
        min_new_tokens=given.new_tokens,
        max_new_tokens=given.new_tokens,
        streamer=timer,
        **options,
    )
    end = perf_counter()
    return timer.first - begin, end - timer.first, output[0, len(ids) :].tolist()


class FirstToken:
    """A transformers streamer that notes when the first new token came."""

    def __init__(self) -> None:
        self.calls, self.first = 0, 0.0

    def put(self, _: Any) -> None:
        self.calls += 1
        if self.calls == 2:  # the first call brings the prompt
            self.first = perf_counter()

    def end(self) -> None: ...


if __name__ == "__main__":
    main()
