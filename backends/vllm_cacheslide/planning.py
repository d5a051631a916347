"""Plans for annotated requests, and what requests leave behind; made where only tokens are.

In: vLLM's requests with their annotations. Out: a `Planned` request; the stored context that a
finished one becomes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING
from uuid import uuid4

import numpy as np
import numpy.typing as npt
import torch

from cacheslide_agents.chunks import Edit
from cacheslide_agents.errors import CacheSlideError, RequestError, ReuseError
from cacheslide_agents.pages.base import ContextKey, StoredContext
from cacheslide_agents.policies.base import Plan, Population, Reuse
from cacheslide_agents.policies.canonical import Profiles, still_exact
from cacheslide_agents.policies.cost import CostModel
from cacheslide_agents.policies.draft import Prompt
from cacheslide_agents.policies.kept import exact_with
from cacheslide_agents.policies.planner import dense_plan, make_plan
from cacheslide_agents.position.profile import CanonicalRows
from vllm_cacheslide.directory import Directory
from vllm_cacheslide.guard import log
from vllm_cacheslide.orders import Order
from vllm_cacheslide.wire import Annotation

if TYPE_CHECKING:
    from vllm.v1.request import Request

_LEAST_LOADED = 16
"""Exact tokens worth bringing back into vLLM's blocks when vLLM has none of them."""


@dataclass
class Planned:
    """One annotated request on its way. `start`: prompt tokens vLLM had when it was last asked.

    `ordered` is set once the workers were told to prefill it. `keeper`: of several answers to one
    prompt, the one whose keys and values are stored. `canonical`: rows that a profile is used for.
    """

    annotation: Annotation
    plan: Plan
    sources: tuple[int, ...]
    plan_s: float
    salt: str | None
    keeper: bool
    edits: tuple[Edit, ...] = ()
    start: int = 0
    ordered: bool = False
    canonical: CanonicalRows | None = None

    @property
    def length(self) -> int:
        return len(self.plan.ids)

    def order(self, request: Request) -> Order:
        return Order(
            request.request_id,
            self.annotation.request_id,
            self.plan,
            self.sources,
            self.plan_s,
            sibling=not self.keeper,
        )

    def takes_over(self, local: int) -> bool:
        """Whether our workers prefill the prompt, of which vLLM has `local` tokens itself."""
        ours = bool(self.plan.runs) or self.canonical is not None
        if not ours or local >= self.length - 1:
            return False
        if self.plan.narrow is not None and local:
            return False  # it ranks tokens that vLLM has, and gives their rows none to go on from
        if self.salt is not None:
            return True
        return local == 0 and self.plan.head >= _LEAST_LOADED

    def rows(self, local: int) -> int:
        """Tokens our workers will compute, in the first layers at least."""
        if self.plan.narrow is not None:
            return self.length - 1 - max(local, self.plan.head)
        return int(self.plan.active[local : self.length - 1].sum())


class Planning:
    """`off` says why nothing is reused; empty when it is. `one_per_session`: see `Directory`."""

    def __init__(
        self,
        cost: CostModel,
        fingerprint: str,
        off: str,
        one_per_session: bool = False,
        profiles: Profiles | None = None,
    ) -> None:
        self.cost, self.off, self._profiles = cost, off, profiles
        self.directory = Directory(one_per_session)
        self._fingerprint = fingerprint

    def plan(self, request: Request, annotation: Annotation) -> Planned:
        """Dense, with the reason, where a plan cannot be made or carried out."""
        started = perf_counter()
        edits: tuple[Edit, ...] = ()
        canonical: CanonicalRows | None = None
        if annotation.dropped:
            return _dropped(request, annotation)
        try:
            plan = self._made(request, annotation)
            sources = self.directory.sources(plan)
            canonical = self._canonical(plan, annotation.task)
            if canonical is not None:
                plan = replace(plan, exact=still_exact(plan, canonical))
            if plan.view is not None:
                edits = plan.view.edits
                plan = replace(plan, view=None)  # it holds functions, which cannot travel
        except Exception as error:  # trouble inside reuse never fails a request
            if not isinstance(error, CacheSlideError):
                log.warning("request %s: dense after trouble", request.request_id, exc_info=True)
            why = f"{type(error).__name__}: {error}"
            plan, sources, canonical = _fallback(request, annotation, why), (), None
        approximate = bool(plan.runs) or canonical is not None
        salted = (approximate and not plan.exact.all()) or plan.policy.reuse is Reuse.NOTHING
        salt = new_salt() if salted else None
        plan_s = perf_counter() - started
        return Planned(
            annotation, plan, sources, plan_s, salt, keeper=True, edits=edits, canonical=canonical
        )

    def left_behind(self, request: Request, planned: Planned) -> StoredContext | None:
        """What the request's blocks hold; nothing when it was cut off in its prefill."""
        said, plan = planned.annotation, planned.plan
        computed = min(request.num_computed_tokens, request.num_tokens - 1)
        wanted = said.isolated or plan.policy.population is Population.CONTEXT
        if said.dropped or not (said.retain and wanted and planned.keeper) or self.off:
            return None
        if computed < planned.length:
            return None
        ids = np.asarray(request.all_token_ids[:computed], dtype=np.int64)
        if said.isolated:
            ids = ids[: planned.length]
        exact = exact_with(plan.exact, len(ids) - planned.length)
        return StoredContext(
            self._key(said), ids, exact, plan.spans, said.session, isolated=said.isolated
        )

    def _made(self, request: Request, annotation: Annotation) -> Plan:
        ids, policy = ids_of(request), annotation.policy
        if self.off:
            raise ReuseError(self.off)
        if policy.gate is not None or policy.fusion.needs_cached:
            raise ReuseError(
                f"policy {policy.name!r} weighs or drops corrected tokens from layer to layer, "
                "which the vLLM backend does not do; use fusion=Replace() and no gate"
            )
        plan = make_plan(
            ids,
            annotation.spans,
            self._key(annotation),
            annotation.session,
            policy,
            self.directory,
            self.cost,
        )
        if not np.array_equal(plan.positions, np.arange(len(ids))):
            raise ReuseError(f"policy {policy.name!r} leaves gaps between positions; vLLM has none")
        return plan

    def _canonical(self, plan: Plan, task: str) -> CanonicalRows | None:
        if self._profiles is None:
            return None
        return self._profiles.place(plan, task, torch.device("cpu"))

    def _key(self, annotation: Annotation) -> ContextKey:
        return ContextKey(self._fingerprint, annotation.namespace, annotation.task)


def new_salt() -> str:
    """Blocks under it are nobody else's."""
    return f"cacheslide-{uuid4().hex}"


def ids_of(request: Request) -> npt.NDArray[np.int64]:
    return np.asarray(request.prompt_token_ids, dtype=np.int64)


def wants_prompt_logprobs(request: Request) -> bool:
    """vLLM then computes every token of the prompt."""
    params = request.sampling_params
    return params is not None and params.prompt_logprobs is not None


def left_to_vllm(request: Request, plan: Plan) -> Plan:
    """vLLM computes every token: it must for log-probabilities of the prompt, or a hook failed."""
    if wants_prompt_logprobs(request):
        return dense_plan(
            plan.ids, plan.spans, plan.policy, outcome="declined", reason="prompt_logprobs"
        )
    why = "vLLM prefilled the prompt itself; see the engine's log"
    return dense_plan(plan.ids, plan.spans, plan.policy, outcome="fallback", reason=why)


def _dropped(request: Request, annotation: Annotation) -> Planned:
    """Left to vLLM, with its own prefix cache; only the receipt is ours."""
    plan = dense_plan(
        ids_of(request), (), annotation.policy, outcome="declined", reason=annotation.dropped
    )
    return Planned(annotation, plan, (), 0.0, None, keeper=True)


def _fallback(request: Request, annotation: Annotation, why: str) -> Plan:
    """Dense, with the chunks the client named if they fit the prompt."""
    prompt = Prompt(ids_of(request), annotation.spans, annotation.policy)
    try:
        prompt.check()
    except RequestError:
        prompt = replace(prompt, spans=())
    return dense_plan(prompt.ids, prompt.spans, prompt.policy, outcome="fallback", reason=why)
