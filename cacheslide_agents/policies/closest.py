"""Which stored context a prompt is aligned with: the one that shares most tokens.

In: the prompt and the contexts of its task (those of its session first, then newest first). Out:
one of them. Work is capped: of many contexts only those whose chunks look alike are examined,
and shared tokens are counted in any order, which costs much less than an alignment.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from cacheslide_agents.chunks import Span
from cacheslide_agents.pages.base import StoredContext
from cacheslide_agents.prompt.align import shared_tokens

_CONSIDERED = 64
"""Contexts looked at at all."""
_EXAMINED = 4
"""Contexts compared token by token."""
_FIRST = 2
"""Of these, so many by order (session, age); the others by equal chunks."""
_ENOUGH = 0.98
"""A context that shares this much of the prompt is taken without looking further."""


def closest(
    ids: npt.NDArray[np.int64], spans: Sequence[Span], contexts: Sequence[StoredContext]
) -> StoredContext:
    """The context of `contexts`, not empty, that shares most with `ids`; the first one on a tie."""
    if len(contexts) == 1:
        return contexts[0]
    best, most = contexts[0], -1
    for context in _promising(spans, contexts[:_CONSIDERED]):
        if min(len(context), len(ids)) > most:
            shared = shared_tokens(ids, context.ids)
            if shared > most:
                best, most = context, shared
            if most >= _ENOUGH * len(ids):
                break
    return best


def _promising(spans: Sequence[Span], contexts: Sequence[StoredContext]) -> list[StoredContext]:
    if len(contexts) <= _EXAMINED:
        return list(contexts)
    digests = {span.digest for span in spans}
    equal = [
        sum(span.stop - span.start for span in context.spans if span.digest in digests)
        for context in contexts
    ]
    ranked = sorted(range(_FIRST, len(contexts)), key=lambda i: -equal[i])
    chosen = sorted([*range(_FIRST), *ranked[: _EXAMINED - _FIRST]])
    return [contexts[i] for i in chosen]
