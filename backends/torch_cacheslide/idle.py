"""What a backend does while no request waits: dense refreshes and checks of approximate reuse.

In: finished requests, sessions that ask for a refresh. Out: stored contexts computed anew, and
what the quality guard learns. All of it gives way to a request between two layers.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping
from math import inf
from threading import Lock
from time import time

import torch
from torch import Tensor

from cacheslide_agents.errors import ReuseError, StoreError
from cacheslide_agents.pages.base import ContextKey, StoredContext
from cacheslide_agents.pages.lease import Lease
from cacheslide_agents.policies.base import Plan, Policy
from cacheslide_agents.policies.draft import dense_plan
from cacheslide_agents.policies.guard import QualityGuard, Verdict
from torch_cacheslide.jobs import Abandoned, Interrupt, JobQueue
from torch_cacheslide.load import sources_of
from torch_cacheslide.prompted import Prompted
from torch_cacheslide.runtime import Runtime

log = logging.getLogger(__name__)
_SESSIONS = 4096
"""Sessions whose keys are remembered, the last ones seen."""
_REFRESHED = 16
"""Contexts of a distrusted kind of prompt that are computed anew, the newest ones."""


class IdleWork:
    """Schedules work on `queue` that runs `runtime` when no request needs it."""

    def __init__(self, runtime: Runtime, queue: JobQueue, policy: Policy) -> None:
        self._runtime, self._queue, self._policy = runtime, queue, policy
        self._keys: OrderedDict[tuple[str, str], set[ContextKey]] = OrderedDict()
        self._keys_lock = Lock()  # the worker writes, and whoever asks for a refresh reads
        self._counts: dict[str, float] = {"refreshes": 0.0, "guard_kl": 0.0}
        self._leases: dict[Lease, None] = {}

    def after(self, prompted: Prompted) -> None:
        """Look at a request that was prefilled: whose it was, and whether it is to be checked."""
        session, key = prompted.request.session, prompted.key
        if session is not None:
            self._note(session, key)
        guard = self._runtime.guard
        if guard is None:
            return
        if prompted.declined is not None:
            self._check_again(guard, prompted, prompted.declined)
        elif _can_be_off(prompted.plan) and guard.tripped_at(key) is None and guard.due(key):
            self._check(guard, prompted)

    def refresh(self, session: str, namespace: str) -> None:
        """Have the newest context of `session` computed densely, unless it is exact already."""
        with self._keys_lock:
            keys = tuple(self._keys.get((session, namespace), ()))
        for key in keys:
            newest = next(iter(self._runtime.store.find(key, session)), None)
            if newest is not None and newest.session == session and not newest.exact.all():
                self._refresh(newest)

    def close(self) -> None:
        """Let go of what work that will not be done any more held; the queue is closed."""
        while self._leases:
            self._release(next(iter(self._leases)))

    def metrics(self) -> Mapping[str, float]:
        guard = self._runtime.guard
        return {
            **self._queue.counts(),
            **self._counts,
            **(guard.metrics() if guard is not None else {}),
        }

    def _note(self, session: str, key: ContextKey) -> None:
        whose = (session, key.namespace)
        with self._keys_lock:
            self._keys.setdefault(whose, set()).add(key)
            self._keys.move_to_end(whose)
            if len(self._keys) > _SESSIONS:
                self._keys.popitem(last=False)

    def _refresh(self, context: StoredContext) -> None:
        def work(interrupt: Interrupt) -> None:
            if context not in self._runtime.store.find(context.key):
                return  # something newer has taken its place
            if self._runtime.recompute(context, self._policy, interrupt):
                self._counts["refreshes"] += 1

        self._queue.idle(("refresh", id(context)), work)

    def _check(self, guard: QualityGuard, prompted: Prompted) -> None:
        """Compare a reuse with the dense run of the same prompt."""
        plan, key, reused = prompted.plan, prompted.key, prompted.prefilled.logits[-1]
        dense = dense_plan(plan.ids, plan.spans, self._policy, outcome="cold", reason="guard")

        def work(interrupt: Interrupt) -> None:
            prefilled, _ = self._runtime.run(dense, room=0, interrupt=interrupt)
            distance = divergence(prefilled.logits[-1], reused)
            self._judge(guard, key, distance)

        self._queue.idle(("guard", prompted.request.request_id), work)

    def _check_again(self, guard: QualityGuard, prompted: Prompted, declined: Plan) -> None:
        """Try the reuse that was forbidden, if its contexts were stored after it was."""
        key, dense = prompted.key, prompted.prefilled.logits[-1]
        since = guard.tripped_at(key)
        sources = sources_of(declined)
        if since is None or any(source.created < since for source in sources):
            return
        try:
            lease = self._runtime.store.lease(sources)
        except (ReuseError, StoreError):
            return
        self._leases[lease] = None

        def work(interrupt: Interrupt) -> None:
            try:
                placed = self._runtime.planning.canonical(declined, key.task)
                prefilled, _ = self._runtime.run(declined, 0, interrupt, placed)
                distance = divergence(dense, prefilled.logits[-1])
            except Abandoned:
                raise
            except Exception as error:  # what cannot be reused is no reason for trust
                log.info("task %r stays on dense: %s", key.task, error)
                distance = inf
            self._release(lease)
            self._judge(guard, key, distance)

        if not self._queue.idle(("guard", prompted.request.request_id), work):
            self._release(lease)

    def _release(self, lease: Lease) -> None:
        del self._leases[lease]
        lease.release()

    def _judge(self, guard: QualityGuard, key: ContextKey, distance: float) -> None:
        verdict = guard.record(key, distance, time())
        self._counts["guard_kl"] = distance
        if verdict is Verdict.TRIPPED:
            log.warning(
                "task %r of namespace %r is answered densely: reuse was %.3g nats from dense; its "
                "contexts are computed anew",
                key.task,
                key.namespace,
                distance,
            )
            for context in self._runtime.store.find(key)[:_REFRESHED]:
                self._refresh(context)


def _can_be_off(plan: Plan) -> bool:
    """Exact reuse is dense but for rounding: checks of it would only outvote those that count."""
    return bool(plan.runs) and not plan.exact.all()


def divergence(dense: Tensor, reuse: Tensor) -> float:
    """KL(dense || reuse) in nats of two next-token distributions, from logits [vocabulary]."""
    p, q = (torch.log_softmax(logits.double(), dim=-1) for logits in (dense, reuse))
    return max(0.0, float((p.exp() * (p - q)).sum()))
