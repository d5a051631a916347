"""Selective prefill in vLLM's own blocks: several planned prompts through the layers at once.

In: jobs (a plan, blocks, the rows to compute). Out: their slots filled, but for each prompt's last
token, which vLLM computes itself; `job.trouble` says of which that did not work.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from cacheslide_agents.pages.base import PageStore
from cacheslide_agents.position.base import Position
from vllm_cacheslide.loading import Load
from vllm_cacheslide.narrowing import Narrowing
from vllm_cacheslide.passes import LayerPass, attempt
from vllm_cacheslide.rows import Job, batches


class SelectivePrefill:
    """`most_rows`: rows that go through the layers together."""

    def __init__(self, layers: LayerPass, position: Position, most_rows: int) -> None:
        self.layers, self._position, self._most_rows = layers, position, most_rows

    def run(self, jobs: Sequence[Job], store: PageStore) -> None:
        self._run_static([job for job in jobs if job.plan.narrow is None], store)
        for job in jobs:
            if job.plan.narrow is not None:
                narrowing = Narrowing(self.layers, self._position, store, self._most_rows)
                attempt(job, partial(narrowing.run, job))

    def _run_static(self, jobs: Sequence[Job], store: PageStore) -> None:
        """All rows are known: one set for all layers."""
        loads: dict[Job, Load] = {}
        for job in jobs:
            wanted = job.plan.hit & ~job.plan.active
            loads[job] = Load(job, wanted, store, self._position, self.layers.paged)
        layers = range(self.layers.decoder.layers)
        pending = loads
        for batch in batches(jobs, self._most_rows):
            self.layers.run(batch, layers, pending)
            pending = {}
        self.layers.load(layers, pending)  # where nothing was computed
        for job, load in loads.items():
            attempt(job, load.check)
