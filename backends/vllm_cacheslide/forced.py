"""Makes the engine emit tokens that were decided beforehand, so that an answer can be scored.

In: `extra_args={"cacheslide_force": [ids]}` of a request. Out: logits that leave only the next of
them possible. Log-probabilities are reported from the logits as they were before.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

FORCED = "cacheslide_force"


class ForcedTokens(AdapterLogitsProcessor):
    """vLLM's per-request logits processor; requests without the argument are untouched."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(
        self, params: SamplingParams
    ) -> Callable[[list[int], Tensor], Tensor] | None:
        forced = (params.extra_args or {}).get(FORCED)
        if not forced:
            return None

        def force(output_ids: list[int], logits: Tensor) -> Tensor:
            if len(output_ids) >= len(forced):
                return logits
            token = forced[len(output_ids)]
            logits.fill_(-float("inf"))
            logits[token] = 0.0
            return logits

        return force
