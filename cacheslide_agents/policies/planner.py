"""How one request will be prefilled: what is reused, what is computed, and why.

In: prompt tokens and spans, a policy, the page store, the cost model. Out: a `Plan` the executor
follows, or `ReuseError`, on which the executor answers with `dense_plan`. Nothing here writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cacheslide_agents.chunks import Span
from cacheslide_agents.errors import ReuseError
from cacheslide_agents.pages.base import ContextKey, StoredContext
from cacheslide_agents.policies import draft as drafts
from cacheslide_agents.policies.base import ContextSource, Order, Plan, Policy, Probe, Reuse
from cacheslide_agents.policies.closest import closest
from cacheslide_agents.policies.correct import correct
from cacheslide_agents.policies.cost import CostModel
from cacheslide_agents.policies.draft import Prompt, dense_plan
from cacheslide_agents.policies.match import Match, match_chunks, match_context, match_prefix
from cacheslide_agents.policies.work import Work

__all__ = ["MARGIN", "dense_plan", "make_plan"]

MARGIN = 0.05
"""Share of the time of plain prefix reuse that approximate reuse must save to be taken."""


@dataclass(frozen=True)
class _Tools:
    store: ContextSource
    cost: CostModel
    probe: Probe | None


def make_plan(
    ids: npt.NDArray[np.int64],
    spans: Sequence[Span],
    key: ContextKey,
    session: str | None,
    policy: Policy,
    store: ContextSource,
    cost: CostModel,
    probe: Probe | None = None,
) -> Plan:
    """The plan for prompt `ids` int64 [n] under `policy`.

    `probe` serves selectors that look at the update's new keys. Raises `RequestError` for an empty
    prompt or spans that do not partition it, and `ReuseError` for whatever store, policy and
    selector raise, `RequestError` among it: those are no fault of the request.
    """
    prompt = Prompt(np.asarray(ids, dtype=np.int64), tuple(spans), policy)
    prompt.check()
    try:
        return _plan(prompt, key, session, _Tools(store, cost, probe))
    except ReuseError:
        raise
    except Exception as error:
        raise ReuseError(
            f"planning with policy {policy.name!r} failed: {type(error).__name__}: {error}"
        ) from error


def _plan(prompt: Prompt, key: ContextKey, session: str | None, tools: _Tools) -> Plan:
    policy = prompt.policy
    if policy.reuse is Reuse.NOTHING:
        return dense_plan(prompt.ids, prompt.spans, policy, outcome="cold", reason="disabled")
    if policy.reuse is Reuse.CHUNKS:
        match = match_chunks(prompt.ids, prompt.spans, key, tools.store, min_run=policy.min_run)
        return correct(drafts.from_chunks(prompt, match), match, tools.store, tools.probe)
    contexts = [found for found in tools.store.find(key, session) if len(found)]
    if not contexts:
        return dense_plan(prompt.ids, prompt.spans, policy, outcome="cold", reason="cold")
    prefix = match_prefix(prompt.ids, contexts, min_run=policy.min_run)
    if policy.reuse is Reuse.EXACT_PREFIX:
        return drafts.from_prefix(prompt, prefix or Match.nothing(len(prompt.ids), contexts[0]))
    source = closest(prompt.ids, prompt.spans, contexts)
    return _from_runs(prompt, source, prefix or Match.nothing(len(prompt.ids), source), tools)


def _from_runs(prompt: Prompt, source: StoredContext, prefix: Match, tools: _Tools) -> Plan:
    """Every run, unless the exact prefix alone covers as much, or covers less but costs less."""
    policy = prompt.policy
    match = match_context(
        prompt.ids,
        prompt.spans,
        source,
        min_run=policy.min_run,
        any_order=policy.order is Order.ANY,
    )
    if prefix.tokens >= match.tokens:
        return drafts.from_context(prompt, prefix if prefix.runs else match)
    draft = drafts.from_context(prompt, match)
    if not policy.may_decline:
        return correct(draft, match, tools.store, tools.probe)
    plain = drafts.from_prefix(prompt, prefix)
    if not _pays(draft, plain, tools.cost):
        return drafts.declined(plain, draft)
    plan = correct(draft, match, tools.store, tools.probe)
    if plan is draft or _pays(plan, plain, tools.cost):
        return plan
    return drafts.declined(plain, plan)


def _pays(plan: Plan, plain: Plan, cost: CostModel) -> bool:
    """Whether what is left of `plan` is cheaper than `plain`, by more than the margin."""
    seconds = cost.predict(Work.planned(plan, cost.layers))
    return seconds < (1.0 - MARGIN) * cost.predict(Work.planned(plain, cost.layers))
