"""A plan without correction tokens: what a match alone decides.

In: a prompt, a policy, a `Match`. Out: a `Plan` in which only the update and the last token are
active, with its outcome and the reason of every chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from cacheslide_agents.backend import Outcome
from cacheslide_agents.chunks import Span
from cacheslide_agents.errors import RequestError
from cacheslide_agents.policies import outcomes
from cacheslide_agents.policies.base import Plan, Policy
from cacheslide_agents.policies.match import Match


@dataclass(frozen=True)
class Prompt:
    """What is to be prefilled, and how. `ids` int64 [n], `spans` partition them or are empty."""

    ids: npt.NDArray[np.int64]
    spans: tuple[Span, ...]
    policy: Policy

    def check(self) -> None:
        """`RequestError` for an empty prompt or for spans with gaps or overlaps."""
        if self.ids.ndim != 1 or not len(self.ids):
            raise RequestError(
                f"prompt ids have shape {self.ids.shape}; a prompt needs at least one token"
            )
        here = 0
        for span in self.spans:
            if span.start != here or span.stop < here:
                raise RequestError(
                    f"chunk {span.id!r} spans tokens [{span.start}, {span.stop}), but the chunks "
                    f"before it end at {here}; spans must partition the prompt in order"
                )
            here = span.stop
        if self.spans and here != len(self.ids):
            raise RequestError(
                f"the spans end at token {here} of {len(self.ids)}; they must partition the prompt"
            )


def dense_plan(
    ids: npt.NDArray[np.int64],
    spans: Sequence[Span],
    policy: Policy,
    *,
    outcome: Outcome,
    reason: str,
) -> Plan:
    """Everything is computed, at plain positions. With `outcome="fallback"`, `reason` says why."""
    word = "fallback" if outcome == "fallback" else reason
    prompt = Prompt(ids, tuple(spans), policy)
    plan = _plan(prompt, Match.nothing(len(ids)), lambda _: outcomes.same_reason(spans, word))
    return replace(plan, outcome=outcome, reason=reason)


def from_context(prompt: Prompt, match: Match) -> Plan:
    """Every run of the cached context."""
    return _plan(
        prompt,
        match,
        lambda hit: outcomes.reasons_in_context(hit, prompt.spans, match, prompt.policy.min_run),
    )


def from_prefix(prompt: Prompt, match: Match) -> Plan:
    """The exact prefix alone."""
    return _plan(
        prompt,
        match,
        lambda hit: outcomes.reasons_after_prefix(prompt.ids, hit, prompt.spans, match),
    )


def from_chunks(prompt: Prompt, match: Match) -> Plan:
    """Chunks that were stored alone."""
    policy, spans = prompt.policy, prompt.spans
    if not match.runs:
        return dense_plan(prompt.ids, spans, policy, outcome="cold", reason="cold")
    return _plan(
        prompt,
        match,
        lambda hit: {
            **outcomes.reasons_by_chunk(hit, spans, policy.min_run),
            **policy.reasons(spans),
        },
    )


def declined(plain: Plan, draft: Plan) -> Plan:
    """`plain`, taken because it costs less than `draft`; what `draft` has probed was still run."""
    return replace(
        plain,
        outcome="declined",
        reason=outcomes.PREFIX_CHEAPER,
        chunk_reasons=outcomes.reasons_declined(plain.chunk_reasons, draft.hit, plain.spans),
        probe_layer_tokens=draft.probe_layer_tokens,
    )


def exact_mask(plan: Plan) -> npt.NDArray[np.bool_]:
    """[n]: tokens whose keys and values will be those of a dense run.

    A token is exact if it is computed (not fused with what was cached, and in every layer: a gate
    may end a correction), or stands in the head and was exact where it comes from, and all before
    it are exact, at their plain positions.
    """
    sound = ~plan.hit
    if not plan.policy.fusion.needs_cached and plan.policy.gate is None:
        sound |= plan.active
    if plan.head:
        sound[: plan.head] |= plan.runs[0].source.exact[: plan.head]
    sound &= plan.positions == np.arange(len(plan.ids))
    return np.logical_and.accumulate(sound)


def _plan(
    prompt: Prompt, match: Match, reasons: Callable[[npt.NDArray[np.bool_]], Mapping[str, str]]
) -> Plan:
    """The runs of `match` without the last prompt token; `reasons` get the hit mask."""
    length = len(prompt.ids)
    taken = match.without_last(length)
    hit = taken.mask(length)
    plain = np.arange(length, dtype=np.int64)
    draft = Plan(
        ids=prompt.ids,
        positions=prompt.policy.positions(prompt.spans, length) if taken.runs else plain,
        runs=taken.runs,
        active=~hit,
        exact=~hit,
        head=taken.head,
        policy=prompt.policy,
        narrow=None,
        view=None,
        outcome=outcomes.outcome_of(hit, prompt.spans),
        reason="" if taken.runs else "no_run",
        probe_layer_tokens=0,
        spans=prompt.spans,
        chunk_reasons=reasons(hit),
        vanished=outcomes.vanished_chunks(prompt.spans, match),
    )
    return replace(draft, exact=exact_mask(draft))
