"""Plans logged requests one after the other, as a backend would, and counts.

In: requests in order, a model's sizes, policies. Out: a `Prediction` for each request and policy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from cacheslide_agents.backend import Receipt
from cacheslide_agents.bench.replay.model import ReplayModel
from cacheslide_agents.bench.replay.store import TokenStore
from cacheslide_agents.chunks import EncodedPrompt, Role
from cacheslide_agents.errors import DataError, RequestError, ReuseError
from cacheslide_agents.pages.base import ContextKey, StoredContext
from cacheslide_agents.policies.base import Plan, Policy, Population
from cacheslide_agents.policies.planner import dense_plan, make_plan
from cacheslide_agents.policies.receipts import build_receipt
from cacheslide_agents.policies.work import Work
from cacheslide_agents.prompt.logged import LoggedRequest

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Prediction:
    """One request under one policy. Token counts as in a receipt; bytes of keys and values.

    `bytes_reused` are taken from the store, `bytes_stored` are newly kept for later requests.
    `work` is what the prefill does; the model's cost gives it seconds.
    """

    id: str
    where: str
    policy: str
    outcome: str
    reason: str
    prompt_tokens: int
    reused_tokens: int
    active_tokens: int
    compute_fraction: float
    exact: bool
    bytes_reused: int
    bytes_stored: int
    work: Work = field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "work"}


class Replay:
    """One policy's run through a trace, from an empty store."""

    def __init__(self, policy: Policy, model: ReplayModel, store_bytes: int = 4 * GIB) -> None:
        self.policy, self._model = policy, model
        self.store = TokenStore(store_bytes // model.token_bytes)

    def ask(self, request: LoggedRequest, prompt: EncodedPrompt) -> Prediction:
        """Plan `request`, whose tokens are `prompt`, and keep it as a backend would."""
        key = ContextKey(request.model, request.namespace, prompt.task)
        plan = self._plan(key, request, prompt)
        for planned in plan.runs:
            self.store.touch(planned.source)
        receipt = _receipt(plan, self._model.geometry.layers)
        kept = self._remember(key, request, plan) if request.retain else 0
        return Prediction(
            id=request.id,
            where=request.where,
            policy=receipt.policy,
            outcome=receipt.outcome,
            reason=receipt.reason,
            prompt_tokens=receipt.prompt_tokens,
            reused_tokens=receipt.reused_tokens,
            active_tokens=receipt.active_tokens,
            compute_fraction=receipt.compute_fraction,
            exact=receipt.exact,
            bytes_reused=receipt.reused_tokens * self._model.token_bytes,
            bytes_stored=kept * self._model.token_bytes,
            work=Work.planned(plan, self._model.geometry.layers),
        )

    def _plan(self, key: ContextKey, request: LoggedRequest, prompt: EncodedPrompt) -> Plan:
        ids = np.asarray(prompt.ids, dtype=np.int64)
        cost = self._model.cost
        try:
            return make_plan(ids, prompt.spans, key, request.session, self.policy, self.store, cost)
        except RequestError as error:  # spans that do not partition the tokens
            raise DataError(f"{request.where}: {error}") from error
        except ReuseError as error:
            return dense_plan(ids, prompt.spans, self.policy, outcome="fallback", reason=str(error))

    def _remember(self, key: ContextKey, request: LoggedRequest, plan: Plan) -> int:
        """Tokens that become cached contexts."""
        if self.policy.population is Population.CONTEXT:
            answer = self._model.output_ids(request.output)
            ids = np.concatenate([plan.ids, np.asarray(answer, dtype=np.int64)])
            exact = np.concatenate([plan.exact, np.full(len(answer), bool(plan.exact.all()))])
            context = StoredContext(key, ids, exact, plan.spans, request.session)
            return len(ids) if self.store.put(context) else 0
        if self.policy.population is Population.ISOLATED:
            return sum(self._remember_alone(key, chunk) for chunk in _reusable(plan))
        return 0

    def _remember_alone(self, key: ContextKey, ids: npt.NDArray[np.int64]) -> int:
        if self.store.find_isolated(key, ids) is not None:
            return 0
        context = StoredContext(key, ids, np.ones(len(ids), dtype=np.bool_), isolated=True)
        return len(ids) if self.store.put(context) else 0


def predict(
    requests: Iterable[LoggedRequest],
    model: ReplayModel,
    policies: Mapping[str, Policy],
    *,
    store_bytes: int = 4 * GIB,
) -> Iterator[Prediction]:
    """A prediction per measured request and policy, in order; every policy has its own store."""
    replays = [Replay(policy, model, store_bytes) for policy in policies.values()]
    for request in requests:
        prompt = request.encode(model.encoder)
        for replay in replays:
            prediction = replay.ask(request, prompt)
            if request.measured:
                yield prediction


def _receipt(plan: Plan, layers: int) -> Receipt:
    """The receipt of a prefill that does what `plan` asks for.

    Which candidates a narrowing selector keeps is not known without keys, but how many is: the
    first ones stand for them.
    """
    active = np.flatnonzero(plan.active)
    rows = [len(active)] * layers
    if plan.narrow is not None and plan.view is not None:
        wide = min(plan.narrow.layer + 1, layers)
        all_rows = np.union1d(active, np.arange(plan.head, len(plan.ids)))
        candidates = plan.view.candidates
        active = np.union1d(active, candidates[: plan.narrow.budget(len(candidates))])
        rows = [len(all_rows)] * wide + [len(active)] * (layers - wide)
    return build_receipt(plan, request_id="", active=active, rows_per_layer=rows)


def _reusable(plan: Plan) -> Iterator[npt.NDArray[np.int64]]:
    for span in plan.spans:
        if span.role is Role.REUSE and len(span):
            yield plan.ids[span.start : span.stop]
