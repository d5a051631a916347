"""From logits to the next token.

In: `Sampling` parameters and the logits of one position. Out: a token id. Filters come in the
order of transformers' processors: temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cacheslide_agents.backend import Sampling
from cacheslide_agents.errors import ModelError

NUCLEUS_GUESS = 512  # most nuclei are smaller, and sorting a whole vocabulary takes milliseconds


class Sampler:
    """Draws tokens with `sampling`, reproducibly when its `seed` is set.

    `generator` is a CPU generator (made from the seed when left out): draws happen on the CPU, so
    that a seed means the same on every device.
    """

    def __init__(self, sampling: Sampling, generator: torch.Generator | None = None) -> None:
        self._sampling = sampling
        self._generator = generator if generator is not None else _generator(sampling.seed)

    def next_token(self, logits: Tensor) -> int:
        """The next id for `logits` [vocab]; -inf forbids a token.

        Raises `ModelError` on NaN, on +inf, and when every token is forbidden.
        """
        if self._sampling.temperature == 0.0:
            token = logits.argmax()
            check_best(logits[token])
            return int(token)
        probabilities = self.probabilities(logits)
        kept = probabilities.nonzero().squeeze(-1)
        mass = probabilities[kept].double().cumsum(0)
        draw = torch.rand((), generator=self._generator, dtype=torch.float64).to(mass.device)
        place = torch.searchsorted(mass, draw * mass[-1], right=True)
        # the product may round up to the whole mass
        return int(kept[place.clamp(max=len(kept) - 1)])

    def probabilities(self, logits: Tensor) -> Tensor:
        """What a draw follows at temperature > 0: float32 [vocab], zero where filtered out.

        Tokens that tie with the k-th best are kept, as transformers does; the nucleus is the
        fewest most likely tokens whose probabilities reach `top_p`, one at least.
        """
        best = logits.max()
        check_best(best)
        # Relative to the best: a tiny temperature sends the others to -inf, not the best to inf.
        temperature = max(self._sampling.temperature, torch.finfo(torch.float32).tiny)
        scores = (logits.float() - best.float()) / temperature
        return self._likely(torch.softmax(self._nucleus(self._top(scores)), dim=-1))

    def _top(self, scores: Tensor) -> Tensor:
        k = self._sampling.top_k
        if k == 0 or k >= len(scores):
            return scores
        worst = scores.topk(k).values[-1]
        return scores.masked_fill(scores < worst, -torch.inf)

    def _nucleus(self, scores: Tensor) -> Tensor:
        if self._sampling.top_p == 1.0:
            return scores
        probabilities = torch.softmax(scores, dim=-1)
        inside = self._inside(probabilities, min(NUCLEUS_GUESS, len(scores)))
        if inside is None:
            inside = self._inside(probabilities, len(scores))
        assert inside is not None
        return torch.full_like(scores, -torch.inf).index_copy_(0, inside, scores[inside])

    def _likely(self, probabilities: Tensor) -> Tensor:
        """Without the tokens less likely than `min_p` times the likeliest."""
        if self._sampling.min_p == 0.0:
            return probabilities
        least = self._sampling.min_p * probabilities.max()
        kept = probabilities.masked_fill(probabilities < least, 0.0)
        return kept / kept.sum()

    def _inside(self, probabilities: Tensor, width: int) -> Tensor | None:
        """Ids of the nucleus; `None` when it does not end within the `width` most likely tokens."""
        likely = probabilities.topk(width)
        inside = likely.values.cumsum(0) - likely.values < self._sampling.top_p
        if inside[-1] and width < len(probabilities):
            return None
        return likely.indices[inside]


def _generator(seed: int | None) -> torch.Generator:
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed % (1 << 64))
    return generator


def check_best(best: Tensor) -> None:
    """`best` is the largest logit, and NaN when any of them is."""
    if not torch.isfinite(best):
        raise ModelError(
            f"the best of the next token's logits is {best.item()}: the model's output is not "
            "usable; prefill densely (reuse=False) to see whether reuse is the cause"
        )
