"""How one request is about to be prefilled: by plan, or dense where none can be made.

In: a request and its policy. Out: an `Attempt`, and what stands by when it goes wrong. Nothing a
policy, a store or a profile raises gets past here; nor does reuse that the quality guard distrusts.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np
import numpy.typing as npt
import torch

from cacheslide_agents.backend import GenerationRequest, Outcome
from cacheslide_agents.pages.base import ContextKey, PageStore
from cacheslide_agents.pages.lease import Lease
from cacheslide_agents.policies.base import Plan, Policy, Probe
from cacheslide_agents.policies.canonical import Profiles, still_exact
from cacheslide_agents.policies.cost import CostModel
from cacheslide_agents.policies.guard import QualityGuard
from cacheslide_agents.policies.planner import dense_plan, make_plan
from cacheslide_agents.position.profile import CanonicalRows
from torch_cacheslide.load import sources_of

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Attempt:
    """`lease` holds what `plan` reuses, or the plan that the quality guard `declined`."""

    plan: Plan
    plan_s: float
    lease: Lease | None = None
    declined: Plan | None = None
    canonical: CanonicalRows | None = None

    @property
    def plain(self) -> bool:
        """Dense, at plain positions: there is no safer way."""
        return not self.plan.runs and self.canonical is None

    def release(self) -> None:
        if self.lease is not None:
            self.lease.release()


class Planning:
    """`probe` serves selectors that look at new keys; profiles go to `device`."""

    def __init__(
        self,
        store: PageStore,
        cost: CostModel,
        fingerprint: str,
        probe: Probe,
        *,
        guard: QualityGuard | None,
        profiles: Profiles | None,
        device: torch.device,
    ) -> None:
        self._store, self._cost, self._fingerprint = store, cost, fingerprint
        self._probe, self._guard, self._profiles = probe, guard, profiles
        self._device = device

    def attempt(self, request: GenerationRequest, policy: Policy) -> Attempt:
        started = perf_counter()
        try:
            attempt = self._leased(request, policy)
            try:
                attempt = self._placed(self._trusted(attempt, request), request.task)
            except Exception:
                attempt.release()
                raise
        except Exception as error:
            return fallen(request, policy, error, perf_counter() - started)
        return replace(attempt, plan_s=perf_counter() - started)

    def key(self, request: GenerationRequest) -> ContextKey:
        return ContextKey(self._fingerprint, request.namespace, request.task)

    def canonical(self, plan: Plan, task: str) -> CanonicalRows | None:
        """Where a profile puts rows of `plan` that are computed; `None` without one."""
        if self._profiles is None:
            return None
        return self._profiles.place(plan, task, self._device)

    def _leased(self, request: GenerationRequest, policy: Policy) -> Attempt:
        plan = make_plan(
            ids_of(request),
            request.spans,
            self.key(request),
            request.session,
            policy,
            self._store,
            self._cost,
            self._probe,
        )
        return Attempt(plan, 0.0, self._store.lease(sources_of(plan)) if plan.runs else None)

    def _trusted(self, attempt: Attempt, request: GenerationRequest) -> Attempt:
        """`attempt` itself, or dense where the quality guard forbids it."""
        plan = attempt.plan
        if not plan.runs or not self._distrusts(self.key(request), plan):
            return attempt
        dense = _dense(request, plan.policy, "declined", "guard")
        return replace(attempt, plan=dense, declined=plan)

    def _distrusts(self, key: ContextKey, plan: Plan) -> bool:
        """Exact reuse of what was stored since the guard put `key` on dense is not in question."""
        if self._guard is None:
            return False
        since = self._guard.tripped_at(key)
        fresh = since is not None and all(each.created >= since for each in sources_of(plan))
        return not (fresh and plan.exact.all()) and self._guard.declines(key)

    def _placed(self, attempt: Attempt, task: str) -> Attempt:
        canonical = self.canonical(attempt.plan, task)
        if canonical is None:
            return attempt
        plan = replace(attempt.plan, exact=still_exact(attempt.plan, canonical))
        return replace(attempt, plan=plan, canonical=canonical)


def ids_of(request: GenerationRequest) -> npt.NDArray[np.int64]:
    return np.asarray(request.prompt_ids, dtype=np.int64)


def fallen(request: GenerationRequest, policy: Policy, error: Exception, seconds: float) -> Attempt:
    """Dense, since `error`, just caught, ended another attempt after `seconds`."""
    log.warning("request %s: dense after trouble", request.request_id, exc_info=True)
    why = f"{type(error).__name__}: {error}"
    return Attempt(_dense(request, policy, "fallback", why), seconds)


def _dense(request: GenerationRequest, policy: Policy, outcome: Outcome, reason: str) -> Plan:
    return dense_plan(ids_of(request), request.spans, policy, outcome=outcome, reason=reason)
