"""Gives a cost model its seconds, so that predicted times to the first token mean something.

In: a result file of `cacheslide bench`, or a backend and a few requests. Out: a `Basis`: where the
prices come from, how many times they were fitted to, and how far the fit is from these.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from uuid import uuid4

from cacheslide_agents.answered import answered
from cacheslide_agents.backend import Backend, GenerationRequest, Receipt, Sampling
from cacheslide_agents.bench.measure import REFERENCE
from cacheslide_agents.bench.replay.model import ReplayModel
from cacheslide_agents.bench.replay.predict import Replay
from cacheslide_agents.bench.results import Row, read_results
from cacheslide_agents.chunks import EncodedPrompt
from cacheslide_agents.errors import DataError
from cacheslide_agents.policies.base import Policy
from cacheslide_agents.policies.work import Work
from cacheslide_agents.prompt.logged import LoggedRequest

Observed = list[tuple[Work, float]]


@dataclass(frozen=True, slots=True)
class Basis:
    """`median_error`: of the fitted times themselves, relative; new requests may be further off."""

    source: str
    observations: int
    median_error: float


def read_prices(path: str | Path, model: ReplayModel, policies: Collection[str]) -> Basis:
    """Fit the model's cost to a benchmark's rows of `policies` and of the dense run.

    Its times include tokenisation. Other policies' rows have other prices: a pass that ranks keys,
    chunks that were stored alone.
    """
    observed = [
        (row_work(row, model.geometry.layers), row.ttft_s)
        for row in read_results(path).rows
        if row.policy in {*policies, REFERENCE} and row.outcome != "fallback" and row.ttft_s > 0
    ]
    if not observed:
        raise DataError(f"{path} holds no row that a price could be read from")
    return _fit(str(path), model, observed)


def row_work(row: Row, layers: int) -> Work:
    """The work of a measured row. Which tokens were active is not in the file: up to the first
    change none were, after it they are taken to lie evenly. Exact for `recompute` and `prefix`.
    """
    rows = row.compute_fraction * row.prompt_tokens * layers
    first = row.prompt_tokens - row.active_tokens if row.policy == "prefix" else row.first_change
    start = 0 if row.active_tokens == row.prompt_tokens else first
    pairs = rows * (start + row.prompt_tokens + 1) / 2
    past_head = row.reused_tokens > row.first_change and row.policy != "prefix"
    return Work(rows, pairs, float(row.reused_tokens * layers), float(past_head))


def measure_prices(
    backend: Backend,
    requests: Iterable[LoggedRequest],
    model: ReplayModel,
    policies: Mapping[str, Policy],
) -> Basis:
    """Run `requests` on the backend under every policy and fit the model's cost to the times.

    The first request of each policy only warms up. One that the backend plans otherwise than the
    replay is left out.
    """
    observed: Observed = []
    asked = [(request, request.encode(model.encoder)) for request in requests]
    for policy in policies.values():
        replay, run = Replay(policy, model), uuid4().hex
        for number, (request, prompt) in enumerate(asked):
            prediction = replay.ask(replace(request, output=""), prompt)
            receipt = _receipt(backend, request, prompt, policy, run)
            if number and receipt.active_tokens == prediction.active_tokens:
                observed.append((prediction.work, receipt.ttft_s))
    if not observed:
        raise DataError("no time could be measured; the trace needs at least two requests")
    return _fit(f"measured on {backend.model_id}", model, observed)


def _receipt(
    backend: Backend, request: LoggedRequest, prompt: EncodedPrompt, policy: Policy, run: str
) -> Receipt:
    """That of one token, in a namespace of this run and policy alone."""
    asked = GenerationRequest.of(
        prompt,
        namespace=f"replay-{run}-{request.namespace}",
        session=request.session,
        sampling=Sampling(max_tokens=1),
        policy=policy,
        retain=request.retain,
    )
    return answered(backend, asked).receipt


def _fit(source: str, model: ReplayModel, observed: Observed) -> Basis:
    for work, seconds in observed:
        model.cost.observe(work, seconds)
    errors = [abs(model.cost.predict(work) / seconds - 1.0) for work, seconds in observed]
    return Basis(source, len(observed), median(errors))
