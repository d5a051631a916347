"""One request on the worker thread: plan, prefill (or fall back to dense), remember.

In: a `GenerationRequest` and its policy. Out: a `Prompted` request whose working cache is filled,
ready to decode or score. Whatever goes wrong inside reuse is answered by dense prefill; so is what
the quality guard distrusts.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from time import perf_counter

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cacheslide_agents.backend import GenerationRequest, Outcome, Receipt
from cacheslide_agents.chunks import Role
from cacheslide_agents.errors import ModelError, NonFiniteError, RequestError
from cacheslide_agents.pages.base import ContextKey, PageStore, StoredContext
from cacheslide_agents.pages.lease import Lease
from cacheslide_agents.policies.base import Plan, Policy, Population
from cacheslide_agents.policies.canonical import Profiles, still_exact
from cacheslide_agents.policies.cost import CostModel
from cacheslide_agents.policies.draft import Prompt
from cacheslide_agents.policies.guard import QualityGuard
from cacheslide_agents.policies.planner import dense_plan, make_plan
from cacheslide_agents.policies.receipts import build_receipt
from cacheslide_agents.policies.work import Work
from cacheslide_agents.position.base import Position
from cacheslide_agents.position.profile import CanonicalRows
from torch_cacheslide.cache import Arena, WorkingCache
from torch_cacheslide.load import Loading, sources_of
from torch_cacheslide.memory import slots
from torch_cacheslide.prefill import Interrupt, Prefilled, SelectivePrefill, go_on
from torch_cacheslide.prompted import Prompted
from torch_cacheslide.remember import Refresh, remember
from torch_cacheslide.stack import DecoderStack

log = logging.getLogger(__name__)


class Runtime:
    """Model, page store and working memory of one backend; used by its worker thread only."""

    def __init__(
        self,
        stack: DecoderStack,
        rotary: Position,
        store: PageStore,
        cost: CostModel,
        fingerprint: str,
        *,
        loading: Loading | None = None,
        refresh: Refresh = Refresh.CORRECTED,
        guard: QualityGuard | None = None,
        profiles: Profiles | None = None,
    ) -> None:
        self.stack, self.rotary, self.store, self.cost = stack, rotary, store, cost
        self._fingerprint = fingerprint
        self._loading, self._refresh = loading or Loading(), refresh
        self.guard, self._profiles = guard, profiles
        self._arena = Arena(
            stack.layers, stack.kv_heads, stack.head_dim, dtype=stack.dtype, device=stack.device
        )

    def prefill(self, request: GenerationRequest, policy: Policy, room: int) -> Prompted:
        """Prefill the prompt, with space for `room` more tokens."""
        started = perf_counter()
        plan, lease, declined, canonical = None, None, None, None
        try:
            plan = self._plan(request, policy)
            lease = self.store.lease(sources_of(plan)) if plan.runs else None
            if plan.runs and self._distrusts(self._key(request), plan):
                declined, plan = plan, _dense(request, policy, "declined", "guard")
            canonical = self.canonical(plan, request.task)
            if canonical is not None:
                plan = replace(plan, exact=still_exact(plan, canonical))
            plan_s = perf_counter() - started
            prefilled, cache = self.run(plan, room, canonical=canonical)
        except (ModelError, RequestError):
            _release(lease)
            raise
        except Exception as error:  # trouble inside reuse never fails a request
            log.warning("request %s: dense after trouble", request.request_id, exc_info=True)
            _release(lease)
            plan_s = perf_counter() - started
            plan, canonical = _fallen(request, policy, error), None
            prefilled, cache = self.run(plan, room)
        else:
            work = Work.measured(plan, prefilled.rows_per_layer, prefilled.pairs)
            self.cost.observe(work, plan_s + prefilled.wait_s + prefilled.compute_s)
        receipt = self._receipt(request, plan, prefilled, cache, plan_s)
        if canonical is not None:
            receipt = replace(receipt, ccpe=canonical.tokens)
        return Prompted(
            request, self._key(request), plan, prefilled, cache, receipt, lease, declined
        )

    def remember(self, prompted: Prompted, generated: list[int]) -> None:
        """Make the prompt and its output the next turn's cached context; trouble is only logged."""
        policy, request = prompted.plan.policy, prompted.request
        try:
            if policy.population is Population.CONTEXT:
                remember(
                    self.store,
                    self.rotary,
                    prompted.key,
                    prompted.plan,
                    prompted.cache,
                    generated=generated,
                    session=request.session,
                    residuals=prompted.prefilled.residuals or None,
                    refresh=self._refresh,
                    lease=prompted.lease if prompted.plan.runs else None,
                )
            elif policy.population is Population.ISOLATED:
                self.populate_chunks(request, policy)
        except Exception:  # the answer is out already; only the next turn is slower
            log.warning("request %s: context not kept", request.request_id, exc_info=True)

    def recompute(self, context: StoredContext, policy: Policy, interrupt: Interrupt) -> bool:
        """Store `context` anew, computed densely; false if the store refused it."""
        plan = dense_plan(context.ids, context.spans, policy, outcome="cold", reason="refresh")
        prefilled, cache = self.run(plan, room=0, interrupt=interrupt)
        return remember(
            self.store,
            self.rotary,
            context.key,
            plan,
            cache,
            session=context.session,
            residuals=prefilled.residuals or None,
        )

    def populate_chunks(self, request: GenerationRequest, policy: Policy) -> None:
        """Prefill each chunk alone, as CacheBlend and EPIC do; known chunks stay as they are."""
        key = self._key(request)
        prompt = _ids(request)
        Prompt(prompt, tuple(request.spans), policy).check()
        for span in request.spans:
            ids = prompt[span.start : span.stop]
            if span.role is Role.RECOMPUTE or len(ids) == 0:
                continue
            if self.store.find_isolated(key, ids) is not None:
                continue
            alone = dense_plan(ids, (), policy, outcome="cold", reason="isolated")
            _, cache = self.run(alone, room=0)
            remember(self.store, self.rotary, key, alone, cache, isolated=True)

    def _distrusts(self, key: ContextKey, plan: Plan) -> bool:
        """Exact reuse of what was stored since the guard put `key` on dense is not in question."""
        if self.guard is None:
            return False
        since = self.guard.tripped_at(key)
        fresh = since is not None and all(each.created >= since for each in sources_of(plan))
        return not (fresh and plan.exact.all()) and self.guard.declines(key)

    def _plan(self, request: GenerationRequest, policy: Policy) -> Plan:
        return make_plan(
            _ids(request),
            request.spans,
            self._key(request),
            request.session,
            policy,
            self.store,
            self.cost,
            self._probe,
        )

    def _receipt(
        self,
        request: GenerationRequest,
        plan: Plan,
        prefilled: Prefilled,
        cache: WorkingCache,
        plan_s: float,
    ) -> Receipt:
        return build_receipt(
            plan,
            request_id=request.request_id,
            active=prefilled.active,
            rows_per_layer=prefilled.rows_per_layer,
            plan_s=plan_s,
            load_s=prefilled.load_s,
            compute_s=prefilled.compute_s,
            wait_s=prefilled.wait_s,
            peak_kv_bytes=self._arena.nbytes + cache.captured_nbytes,
        )

    def _key(self, request: GenerationRequest) -> ContextKey:
        return ContextKey(self._fingerprint, request.namespace, request.task)

    def _probe(self, draft: Plan, rows: npt.NDArray[np.int64], layer: int) -> Tensor:
        """Position-free keys [rows, kv_heads, head_dim] at `layer`, for selectors that ask."""
        cache = WorkingCache(*self._arena.take(len(draft.ids)))
        prefill = SelectivePrefill(self.stack, self.rotary, self.store, draft, cache)
        with torch.inference_mode():
            return prefill.keys_at(rows, layer)

    def canonical(self, plan: Plan, task: str) -> CanonicalRows | None:
        """Where a profile puts rows of `plan` that are computed; `None` without one."""
        if self._profiles is None:
            return None
        return self._profiles.place(plan, task, self.stack.device)

    def run(
        self,
        plan: Plan,
        room: int,
        interrupt: Interrupt = go_on,
        canonical: CanonicalRows | None = None,
    ) -> tuple[Prefilled, WorkingCache]:
        """Carry out `plan`. `NonFiniteError` where what is reused is not finite."""
        spare = self._loading.spare(plan)
        cache = WorkingCache(*slots(self._arena, len(plan.ids) + room, spare), spare)
        gate = plan.policy.gate
        dense = not plan.runs
        inner = self.stack.layers - 1  # after the last layer nothing is promoted
        checkpoints = range(gate.every - 1, inner, gate.every) if gate and dense else ()
        prefill = SelectivePrefill(
            self.stack,
            self.rotary,
            self.store,
            plan,
            cache,
            loading=self._loading,
            residual_layers=checkpoints,
            interrupt=interrupt,
            canonical=canonical,
        )
        with torch.inference_mode():
            prefilled = prefill.run()
        if not prefilled.finite:
            if plan.runs:
                raise NonFiniteError("keys, values or logits of the reused prompt are not finite")
            raise ModelError("the dense logits are not finite; check the weights and the dtype")
        return prefilled, cache


def _ids(request: GenerationRequest) -> npt.NDArray[np.int64]:
    return np.asarray(request.prompt_ids, dtype=np.int64)


def _dense(request: GenerationRequest, policy: Policy, outcome: Outcome, reason: str) -> Plan:
    return dense_plan(_ids(request), request.spans, policy, outcome=outcome, reason=reason)


def _fallen(request: GenerationRequest, policy: Policy, error: Exception) -> Plan:
    return _dense(request, policy, "fallback", f"{type(error).__name__}: {error}")


def _release(lease: Lease | None) -> None:
    if lease is not None:
        lease.release()
