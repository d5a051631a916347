"""Active rows of CoPE models, some of them at canonical positions (CCPE).

In: a batch of rows whose jobs may name canonical rows. Out: the forward context of `Runs`, whose
sequences say so to every layer's attention.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from vllm_cacheslide.attention import Runs
from vllm_cacheslide.cope.sequences import Sequences
from vllm_cacheslide.rows import Batch


class CopeRuns(Runs):
    """One sequence for each of the batch's parts, in their order."""

    def metadata(self, batch: Batch, slots: Tensor, positions: Tensor) -> Sequences:
        made = super().metadata(batch, slots, positions)
        assert isinstance(made, Sequences)
        each = [
            replace(sequence, canonical=job.canonical)
            for sequence, (job, _) in zip(made.each, batch.parts, strict=True)
        ]
        return Sequences(tuple(each))
