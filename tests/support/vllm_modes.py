"""Asks one engine after another, each in another mode of vLLM's, in a process of its own.

In: the folder of a model and a file to write. Out: `.npz` with log-probabilities [tokens,
vocabulary] under `mode/length/what`, and under `told` what the receipts and layouts said, as JSON.
Run as a script: a process has room for one engine at a time, and the tests' own is taken.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo

from cacheslide_agents.policies import CacheSlide, Recompute
from cacheslide_agents.policies.base import Policy
from cacheslide_agents.selection import Everything

LENGTHS = (150, 700)
CONTINUATION = [17, 400, 23, 5, 301, 88, 42, 250]
"""Tokens that are scored after every prompt."""
TURNS = 10
TRACED = {"enforce_eager": False, "compilation_config": {"mode": 2, "backend": "eager"}}
"""As vLLM runs a model on a CPU unless told otherwise, but for the compiler behind the tracer."""
MODES: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16", "block_size": 64},
    "float16": {"dtype": "float16", "block_size": 32},
    "float32": {"dtype": "float32", "block_size": 96, **TRACED},
}
REUSE = CacheSlide(may_decline=False)
NOTHING = CacheSlide(selector=None, may_decline=False)
ALL = CacheSlide(selector=Everything(), may_decline=False)


def chained(seed: int) -> Iterator[tuple[list[int], int]]:
    """Prompts of `TURNS` + 1 turns, each with another update, and the token where the tail starts.

    The update grows and shrinks, so that the tail, which stays the same, moves to and fro.
    """
    numbers = np.random.default_rng(seed)

    def text(count: int) -> list[int]:
        return [int(token) for token in numbers.integers(2, 512, count)]

    head, tail = text(64), text(200)
    for turn in range(TURNS + 1):
        update = text(20 + 37 * (turn % 3))
        yield head + update + tail, len(head) + len(update)


class Asked:
    """One engine, and what it said."""

    def __init__(self, lab: Any, backend: Any) -> None:
        self._lab, self._backend = lab, backend
        self.arrays: dict[str, np.ndarray] = {}
        self.told: dict[str, Any] = {}

    def score(self, what: str, ids: list[int], policy: Policy, namespace: str) -> None:
        asked = self._lab.request(ids, policy, namespace=namespace)
        scores = self._backend.score(asked, CONTINUATION)
        self.arrays[what] = scores.logprobs
        self.told[what] = scores.receipt.to_dict()

    def prompts(self, length: int) -> None:
        """A first prompt and a moved one: vLLM's way, and all of ours that must be the same."""
        first, second = self._lab.turns(length, length)
        name = str(length)
        self.score(f"{length}/first", first, Recompute(), name)
        self.score(f"{length}/second", second, Recompute(), name)
        self._backend.warm(self._lab.request(first, REUSE, namespace=name))
        self._lab.forget_prefixes(self._backend)
        self.score(f"{length}/unchanged", first, REUSE, name)
        self.score(f"{length}/corrected", second, ALL, name)
        self.score(f"{length}/uncorrected", second, NOTHING, name)
        self._lab.working(self._backend).store.clear()
        self.score(f"{length}/dense", second, NOTHING, name)

    def chain(self, policy: Policy) -> None:
        """Keys of the tail as stored after every turn: [turns, layers, kv_heads, tokens, dim]."""
        name, store = policy.name, self._lab.working(self._backend).store
        kept, outcomes = [], []
        for ids, tail in chained(3):
            asked = self._lab.request(
                ids, policy, namespace=name, retain=True, max_tokens=1, logprobs=None
            )
            outcomes.append(self._lab.ask(self._backend, asked).receipt.outcome)
            self._lab.settle(self._backend)
            newest, *_ = store.find(self._lab.key_of(self._backend, name))
            layers = [store.load(newest, layer)[0] for layer in range(self._backend.layers)]
            kept.append([keys[:, tail : tail + 199].float().numpy() for keys in layers])
        self.arrays["chain"], self.told["chain"] = np.array(kept), outcomes

    def layout(self) -> dict[str, Any]:
        """How the engine lays out its cache, and how many calls of operators torch has traced."""
        paged = self._lab.working(self._backend)._prefill.layers.paged
        calls = torch._dynamo.utils.counters["stats"]["calls_captured"]
        sizes = [paged.block_size, paged.kernel_block_size]
        return {"off": self._backend.off, "block_sizes": sizes, "traced": calls}


def main(model: str, out: str) -> None:
    """One mode after another."""
    lab = _lab()
    arrays: dict[str, np.ndarray] = {}
    told: dict[str, Any] = {}
    for mode, options in MODES.items():
        trace("compilation_config" in options)
        backend = lab.start(model, {"max_num_batched_tokens": 2048, **options})
        asked = Asked(lab, backend)
        try:
            for length in LENGTHS:
                asked.prompts(length)
            asked.chain(NOTHING)
            asked.told["layout"] = asked.layout()
        finally:
            backend.close()
        arrays |= {f"{mode}/{name}": array for name, array in asked.arrays.items()}
        told[mode] = asked.told
    arrays["told"] = np.array(json.dumps(told))
    np.savez(out, **arrays)  # type: ignore[arg-type]


def trace(on: bool) -> None:
    """The variable is read where functions are marked to be compiled: vLLM's sampler's, at its
    import, which would take half a minute; the setting where they are called."""
    os.environ["TORCHDYNAMO_DISABLE"] = "0" if on else "1"
    torch._dynamo.config.disable = not on


def _lab() -> Any:
    spec = spec_from_file_location("vllm_engines", Path(__file__).with_name("vllm_engines.py"))
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules["vllm_engines"] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    main(*sys.argv[1:])
