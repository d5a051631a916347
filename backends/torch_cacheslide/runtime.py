"""One request on the worker thread: prefill it as planned, or fall back to dense; remember it.

In: a `GenerationRequest` and its policy. Out: a `Prompted` request whose working cache is filled,
ready to decode or score. Whatever goes wrong inside reuse is answered by dense prefill.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from time import perf_counter

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cacheslide_agents.backend import GenerationRequest, Receipt
from cacheslide_agents.chunks import Role
from cacheslide_agents.errors import ModelError, NonFiniteError
from cacheslide_agents.pages.base import PageStore, StoredContext
from cacheslide_agents.policies.base import Plan, Policy, Population
from cacheslide_agents.policies.canonical import Profiles
from cacheslide_agents.policies.cost import CostModel
from cacheslide_agents.policies.draft import Prompt, dense_plan
from cacheslide_agents.policies.guard import QualityGuard
from cacheslide_agents.policies.receipts import build_receipt
from cacheslide_agents.policies.work import Work
from cacheslide_agents.position.base import Position
from cacheslide_agents.position.profile import CanonicalRows
from torch_cacheslide.branches import Branches
from torch_cacheslide.cache import Arena, WorkingCache
from torch_cacheslide.decode import Continuation, Growth
from torch_cacheslide.jobs import Interrupt
from torch_cacheslide.load import Loading
from torch_cacheslide.memory import NoRoomError, slots
from torch_cacheslide.planning import Attempt, Planning, fallen, ids_of
from torch_cacheslide.prefill import Prefilled, SelectivePrefill, go_on
from torch_cacheslide.prompted import Prompted
from torch_cacheslide.remember import Refresh, remember
from torch_cacheslide.stack import DecoderStack

log = logging.getLogger(__name__)


class Runtime:
    """Model, page store and working memory of one backend; used by its worker thread only."""

    def __init__(
        self,
        stack: DecoderStack,
        position: Position,
        store: PageStore,
        cost: CostModel,
        fingerprint: str,
        *,
        loading: Loading | None = None,
        refresh: Refresh = Refresh.CORRECTED,
        guard: QualityGuard | None = None,
        profiles: Profiles | None = None,
    ) -> None:
        self.stack, self.position, self.store, self.cost = stack, position, store, cost
        self.guard = guard
        self.planning = Planning(
            store,
            cost,
            fingerprint,
            self._probe,
            guard=guard,
            profiles=profiles,
            device=stack.device,
        )
        self._loading, self._refresh = loading or Loading(), refresh
        self._arena = Arena(
            stack.layers, stack.kv_heads, stack.head_dim, dtype=stack.dtype, device=stack.device
        )

    def prefill(self, request: GenerationRequest, policy: Policy, room: int) -> Prompted:
        """Prefill the prompt, with space for `room` more tokens.

        `RequestError` for spans that do not partition it or a prompt that memory does not hold,
        `ModelError` for a model that cannot answer; nothing that a policy raises.
        """
        Prompt(ids_of(request), tuple(request.spans), policy).check()
        started = perf_counter()
        attempt = self.planning.attempt(request, policy)
        try:
            prefilled, cache = self.run(attempt.plan, room, canonical=attempt.canonical)
        except Exception as error:  # trouble inside reuse never fails a request
            attempt.release()
            if attempt.plain or isinstance(error, NoRoomError):
                raise
            attempt = fallen(request, policy, error, perf_counter() - started)
            prefilled, cache = self.run(attempt.plan, room)
        if attempt.plan.outcome != "fallback":
            work = Work.measured(attempt.plan, prefilled.rows_per_layer, prefilled.pairs)
            self.cost.observe(work, attempt.plan_s + prefilled.wait_s + prefilled.compute_s)
        receipt = self._receipt(request, attempt, prefilled, cache)
        key, lease, declined = self.planning.key(request), attempt.lease, attempt.declined
        return Prompted(request, key, attempt.plan, prefilled, cache, receipt, lease, declined)

    def growth(self, prompted: Prompted, width: int) -> Growth:
        """Where answers go on, at most `width` of them at a time."""
        if width == 1:
            return self.continuation(prompted)
        length, following = _end_of(prompted.plan)
        return Branches(
            self.stack, self.position, prompted.cache, length=length, next_position=following
        )

    def continuation(self, prompted: Prompted) -> Continuation:
        length, following = _end_of(prompted.plan)
        return Continuation(
            self.stack, self.position, prompted.cache, length=length, next_position=following
        )

    def remember(self, prompted: Prompted, generated: list[int]) -> None:
        """Make the prompt and its output the next turn's cached context; trouble is only logged."""
        policy, request = prompted.plan.policy, prompted.request
        try:
            if policy.population is Population.CONTEXT:
                remember(
                    self.store,
                    self.position,
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
            self.position,
            context.key,
            plan,
            cache,
            session=context.session,
            residuals=prefilled.residuals or None,
        )

    def populate_chunks(self, request: GenerationRequest, policy: Policy) -> None:
        """Prefill each chunk alone, as CacheBlend and EPIC do; known chunks stay as they are."""
        key = self.planning.key(request)
        prompt = ids_of(request)
        Prompt(prompt, tuple(request.spans), policy).check()
        for span in request.spans:
            ids = prompt[span.start : span.stop]
            if span.role is Role.RECOMPUTE or len(ids) == 0:
                continue
            if self.store.find_isolated(key, ids) is not None:
                continue
            alone = dense_plan(ids, (), policy, outcome="cold", reason="isolated")
            _, cache = self.run(alone, room=0)
            remember(self.store, self.position, key, alone, cache, isolated=True)

    def _receipt(
        self,
        request: GenerationRequest,
        attempt: Attempt,
        prefilled: Prefilled,
        cache: WorkingCache,
    ) -> Receipt:
        receipt = build_receipt(
            attempt.plan,
            request_id=request.request_id,
            active=prefilled.active,
            rows_per_layer=prefilled.rows_per_layer,
            plan_s=attempt.plan_s,
            load_s=prefilled.load_s,
            compute_s=prefilled.compute_s,
            wait_s=prefilled.wait_s,
            peak_kv_bytes=self._arena.nbytes + cache.captured_nbytes,
        )
        return replace(receipt, ccpe=attempt.canonical.tokens if attempt.canonical else 0)

    def _probe(self, draft: Plan, rows: npt.NDArray[np.int64], layer: int) -> Tensor:
        """Position-free keys [rows, kv_heads, head_dim] at `layer`, for selectors that ask."""
        cache = WorkingCache(*self._arena.take(len(draft.ids)))
        prefill = SelectivePrefill(self.stack, self.position, self.store, draft, cache)
        with torch.inference_mode():
            return prefill.keys_at(rows, layer)

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
        inner = self.stack.layers - 1  # after the last layer nothing is promoted
        checkpoints = range(gate.every - 1, inner, gate.every) if gate and not plan.runs else ()
        prefill = SelectivePrefill(
            self.stack,
            self.position,
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


def _end_of(plan: Plan) -> tuple[int, int]:
    """The prompt's tokens, and the position of what follows them."""
    return len(plan.ids), int(plan.positions[-1]) + 1
