"""The worker's side: carries out a step's orders with this rank's model and page store.

In: orders from the scheduler's side. Out: filled slots, stored contexts, receipts, and what the
scheduler should know. Trouble of one order is answered here: a prefill that fails is done again
densely, a keep that fails is given up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from cacheslide_agents.errors import NonFiniteError, StoreError
from cacheslide_agents.pages.base import StoredContext
from cacheslide_agents.pages.slide import SlideStore
from cacheslide_agents.policies.base import Plan, PlannedRun
from cacheslide_agents.policies.kept import exact_with
from cacheslide_agents.policies.planner import dense_plan
from cacheslide_agents.policies.receipts import build_receipt
from cacheslide_agents.policies.work import Work
from vllm_cacheslide.agreement import agree, fail_together
from vllm_cacheslide.guard import log
from vllm_cacheslide.keeping import Keeping
from vllm_cacheslide.orders import Keep, Note, Order, Prefill, StepOrders, StepResults
from vllm_cacheslide.prefill import SelectivePrefill
from vllm_cacheslide.receipts import Receipts
from vllm_cacheslide.restoring import Restored
from vllm_cacheslide.rows import Job
from vllm_cacheslide.storage import Rank, StoreNews

Exact = npt.NDArray[np.bool_]


class Working:
    """State of one rank. `ages`: the store drops contexts by itself, as time goes by."""

    def __init__(
        self,
        store: SlideStore,
        prefill: SelectivePrefill,
        keeping: Keeping,
        receipts: Receipts,
        restored: Restored,
        rank: Rank,
        layers: int,
        *,
        ages: bool = False,
    ) -> None:
        self.store, self.receipts, self.restored = store, receipts, restored
        self._prefill, self._keeping, self._layers = prefill, keeping, layers
        self._rank, self._stored, self._acted = rank, StoreNews(store), False
        self._ages = ages
        self._contexts: dict[int, StoredContext] = {}
        self._fallen: dict[str, Exact] = {}
        self._lost: set[int] = set()
        self._observed: list[tuple[Work, float]] = []

    def carry_out(self, orders: StepOrders) -> set[int]:
        """Block ids that could not be filled at all; empty unless even dense prefill failed."""
        self._acted |= bool(orders.keeps or orders.prefills or orders.notes)
        if orders.restored is not None:
            self._contexts.update(self.restored.take(orders.restored))
        for keep in orders.keeps:
            self._keep(keep)
        if orders.keeps or (self._ages and (orders.prefills or orders.notes)):
            self._find_lost()
        for ended in orders.ended:
            self._fallen.pop(ended, None)
        for note in orders.notes:
            self._note(note)
        return self._fill(orders.prefills)

    def take_results(self) -> StepResults:
        results = StepResults(frozenset(self._lost), tuple(self._observed))
        self._lost, self._observed = set(), []
        return results

    def take_news(self) -> dict[str, float]:
        """Since the last step that had orders, under our metrics' names; of this rank's store, and
        of the receipts, which are alike on all ranks, if it is the first.
        """
        if not self._acted:
            return {}
        self._acted = False
        told = self.receipts.take_news() if self._rank.head_rank == 0 else {}
        return self._stored.take() | told

    def _keep(self, keep: Keep) -> None:
        fallen = self._fallen.get(keep.order.engine_id)
        context = replace(keep.context, key=self._rank.own(keep.context.key))
        if fallen is not None:
            context = replace(context, exact=exact_with(fallen, len(context) - len(fallen)))
        try:
            kept = self._keeping.keep(
                replace(keep, context=context), self._contexts, fallen is not None
            )
        except Exception:  # the answer is out already; only the next turn is slower
            log.warning("request %s: context not kept", keep.order.request_id, exc_info=True)
            kept = False
        if kept:
            self._contexts[keep.number] = context
        else:
            self._lost.add(keep.number)

    def _find_lost(self) -> None:
        """A new context may have driven out others, or their time may be over."""
        stored = set(self.store.contexts())
        gone = {n for n, context in self._contexts.items() if context not in stored}
        self._lost |= gone
        for number in gone:
            del self._contexts[number]

    def _fill(self, prefills: Sequence[Prefill]) -> set[int]:
        """Reuse where the plan says so; what fails is prefilled densely."""
        jobs = {self._job(prefill): prefill for prefill in prefills}
        agree(list(jobs))
        for job in jobs:
            if job.trouble:
                job.give_up()
        self._attempt(list(jobs))
        fail_together(list(jobs))
        again: dict[Job, Prefill] = {}
        for job, prefill in jobs.items():
            if job.trouble:
                log.warning("request %s: dense after trouble: %s", job.request_id, job.trouble)
                dense = self._dense_job(prefill, job.trouble)
                again[dense] = prefill
                self._fallen[prefill.order.engine_id] = dense.plan.exact
            else:
                self._tell(job, prefill.order)
        self._drop_sources(again)
        self._attempt(list(again))
        for job, prefill in again.items():
            self._tell(job, prefill.order)
        return {block for job in again if job.trouble for block in job.blocks}

    def _drop_sources(self, again: Mapping[Job, Prefill]) -> None:
        """So that nobody meets their trouble again: the store has dropped pages that are torn, but
        cannot know which ones are not finite.
        """
        for job, prefill in again.items():
            if job.plan.reason.startswith(NonFiniteError.__name__):
                sources = prefill.order.sources
                numbers = {number for number in sources if number in self._contexts}
                with suppress(StoreError):  # logged; nobody asks for them any more
                    self.store.remove(self._contexts[number] for number in numbers)
        if again:
            self._find_lost()

    def _attempt(self, jobs: list[Job]) -> None:
        """Trouble that is nobody's in particular is everybody's."""
        if not jobs:
            return
        try:
            self._prefill.run(jobs, self.store)
        except Exception as error:
            log.warning("prefill of %d requests failed", len(jobs), exc_info=True)
            for job in jobs:
                job.fail(error)
        agree(jobs)

    def _job(self, prefill: Prefill) -> Job:
        order, plan, trouble = prefill.order, prefill.order.plan, ""
        missing = [number for number in order.sources if number not in self._contexts]
        if missing:
            trouble = "PageError: the cached context has left the store"
            self._lost.update(missing)  # told again, lest it be planned on for ever
        else:
            plan = self._linked(order)
        active = plan.active
        if plan.narrow is not None:
            active = active | (np.arange(len(active)) >= plan.head)
        return replace(self._made(prefill, plan, active, trouble), canonical=prefill.canonical)

    def _dense_job(self, prefill: Prefill, why: str) -> Job:
        """`start` stays: what vLLM had of the prompt is its own, or what this very request filled
        before it was preempted, which need not be exact.
        """
        ordered = prefill.order.plan
        plan = dense_plan(
            ordered.ids, ordered.spans, ordered.policy, outcome="fallback", reason=why
        )
        exact = exact_with(ordered.exact[: prefill.start], len(plan.ids) - prefill.start)
        return self._made(prefill, replace(plan, exact=exact), plan.active, "")

    def _made(self, prefill: Prefill, plan: Plan, active: np.ndarray, trouble: str) -> Job:
        rows = prefill.start + np.flatnonzero(active[prefill.start : len(plan.ids) - 1])
        return Job(
            prefill.order.engine_id,
            prefill.order.request_id,
            plan,
            prefill.blocks,
            rows,
            prefill.start,
            prefill.edits,
            trouble,
        )

    def _linked(self, order: Order) -> Plan:
        """The plan with this rank's own contexts as the sources of its runs."""
        runs = tuple(
            PlannedRun(planned.run, self._contexts[number])
            for planned, number in zip(order.plan.runs, order.sources, strict=True)
        )
        return replace(order.plan, runs=runs)

    def _tell(self, job: Job, order: Order) -> None:
        """The receipt; vLLM's own last token counts as computed."""
        rows = np.append(job.rows, len(job.plan.ids) - 1)
        per_layer = [count + 1 for count in job.rows_per_layer or [len(job.rows)] * self._layers]
        receipt = build_receipt(
            job.plan,
            request_id=job.request_id,
            active=rows,
            rows_per_layer=per_layer,
            plan_s=order.plan_s,
            load_s=job.load_s,
            wait_s=job.wait_s,
            compute_s=job.compute_s,
        )
        if job.canonical is not None:
            receipt = replace(receipt, ccpe=job.canonical.tokens)
        if not order.sibling:
            self.receipts.add(receipt)
        if not job.trouble and job.plan.outcome != "fallback":
            work = Work.measured(job.plan, per_layer, float(job.pairs))
            self._observed.append((work, order.plan_s + job.wait_s + job.compute_s))

    def _note(self, note: Note) -> None:
        order = note.order
        if order.sibling:
            return
        rows = np.arange(note.start, len(order.plan.ids))
        self.receipts.add(
            build_receipt(
                order.plan,
                request_id=order.request_id,
                active=rows,
                rows_per_layer=[len(rows)] * self._layers,
                plan_s=order.plan_s,
                prefix=note.start,
            )
        )
