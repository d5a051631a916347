"""What a request that asks for log-probabilities is told about each of its tokens.

In: the model's raw logits of one position, before temperature, filters, penalty and grammar, and
the token chosen there. Out: a `TokenLogprob`, equal to what `Backend.score` gives.
"""

from __future__ import annotations

from torch import Tensor, log_softmax

from cacheslide_agents.sampling import TokenLogprob


def token_logprob(logits: Tensor, token: int, alternatives: int) -> TokenLogprob:
    """`logits` [vocabulary]; the `alternatives` most likely tokens come likeliest first."""
    logprobs = log_softmax(logits, dim=-1).float()
    likely = logprobs.topk(min(alternatives, len(logprobs)))
    return TokenLogprob(
        token_id=token,
        logprob=float(logprobs[token]),
        top=tuple(zip(likely.indices.tolist(), likely.values.tolist(), strict=True)),
    )
