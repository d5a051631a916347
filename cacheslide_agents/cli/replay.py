"""`cacheslide replay`: what reuse would make of a log, without running the model.

In: a log of requests, or a workload. Out: predicted hits, recomputed tokens, bytes and time to the
first token, for exact-prefix caching and for CacheSlide.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from cacheslide_agents.cli import options
from cacheslide_agents.cli.console import emit, notes, screen, waiting
from cacheslide_agents.cli.engine import BackendOptions
from cacheslide_agents.cli.models import model_folder
from cacheslide_agents.cli.requests import Source, with_source
from cacheslide_agents.errors import RequestError

if TYPE_CHECKING:
    from cacheslide_agents.bench.replay import Basis, Errors, Prediction, ReplayModel, Totals
    from cacheslide_agents.prompt.logged import LoggedRequest

    Requests = Callable[[], Iterator[LoggedRequest]]

MEASURED = 8
"""Requests that --calibrate runs."""
MIB = 1 << 20


@with_source
def replay(
    *,
    source: Source,
    limit: Annotated[int | None, typer.Option(min=1, help="Turns or requests at most.")] = None,
    max_prompt_tokens: Annotated[int, typer.Option(min=1, help="Of a workload's turn.")] = 4096,
    policies: Annotated[str, typer.Option(help="Names with commas.")] = "prefix,cacheslide",
    model: options.Model = options.DEFAULT_MODEL,
    dtype: Annotated[str, typer.Option(help="Of the stored keys and values.")] = "float32",
    store_mib: Annotated[int, typer.Option(min=1, help="Budget of the store.")] = 4096,
    prices: Annotated[
        Path | None, typer.Option(help="Take seconds from this result file of `bench`.")
    ] = None,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help=f"Take seconds from {MEASURED} requests run here.")
    ] = False,
    against: Annotated[
        Path | None, typer.Option(help="Compare with this result file of `bench`.")
    ] = None,
    backend: options.BackendName = options.DEFAULT_BACKEND,
    device: options.Device = None,
    threads: options.Threads = None,
    as_json: options.Json = False,
) -> None:
    """Predict hits, recomputed tokens, bytes and TTFT of a log of requests.

    A line of TRACE is a request of OpenAI's chat API, or one of ours; docs/traces.md has the keys.
    Without --prices or --calibrate only the work relative to dense prefill is predicted.
    """
    from cacheslide_agents.bench.replay import ReplayModel, measure_prices, predict, read_prices
    from cacheslide_agents.policies import named

    if prices is not None and calibrate:
        raise RequestError("give either --prices or --calibrate")
    chosen = {name: named(name) for name in policies.split(",")}
    if source.trace is not None:
        _check(source.trace, limit)
    found = ReplayModel.read(model_folder(model), dtype)
    requests = _requests(source, found, limit, max_prompt_tokens)
    basis: Basis | None = None
    if prices is not None:
        basis = read_prices(prices, found, chosen)
    elif calibrate:
        with BackendOptions(model, backend, device, dtype, threads).opened() as loaded:
            basis = measure_prices(loaded, islice(requests(), MEASURED), found, chosen)
    with waiting("replaying"):
        predictions = list(predict(requests(), found, chosen, store_bytes=store_mib * MIB))
    report = _Report(found, model, predictions, basis, against)
    report.emit() if as_json else report.show()


def _check(trace: Path, limit: int | None) -> None:
    """Read the lines of a file: what is wrong in it is said before a model is looked for."""
    from cacheslide_agents.bench.replay import read_trace

    if trace.is_file() or not trace.exists():  # what comes through a pipe can be read once only
        for _ in islice(read_trace(trace), limit):
            pass


def _requests(
    source: Source, model: ReplayModel, limit: int | None, max_prompt_tokens: int
) -> Requests:
    """`limit` of a log, or those of `limit` turns; anew at every call."""
    from cacheslide_agents.bench.runner import window_limits

    limits = window_limits(model.tokenizer, model.window, model.encoder.encode, max_prompt_tokens)
    requests = source.requests(limits, turns=limit)
    return requests if source.trace is None else lambda: islice(requests(), limit)


class _Report:
    """Predictions as JSON or as tables."""

    def __init__(
        self,
        model: ReplayModel,
        name: str,
        predictions: list[Prediction],
        basis: Basis | None,
        against: Path | None,
    ) -> None:
        from cacheslide_agents.bench.replay import errors, totals
        from cacheslide_agents.bench.results import read_results

        timed = basis is not None
        self._cost, self._predictions, self._basis = model.cost, predictions, basis
        self._name = name
        self._totals: dict[str, Totals] = totals(predictions, model.cost, timed=timed)
        self._errors: dict[str, Errors] = {}
        if against is not None:
            rows = read_results(against).rows
            self._errors = errors(predictions, rows, model.cost, timed=timed)
        self._too_long = len({p.where for p in predictions if p.prompt_tokens >= model.window})

    def emit(self) -> None:
        emit(
            {
                "model": self._name,
                "basis": None if self._basis is None else asdict(self._basis),
                "over_window": self._too_long,
                "totals": {name: asdict(one) for name, one in self._totals.items()},
                "errors": {name: asdict(one) for name, one in self._errors.items()} or None,
                "requests": [self._row(one) for one in self._predictions],
            }
        )

    def _row(self, one: Prediction) -> dict[str, Any]:
        seconds = None if self._basis is None else self._cost.predict(one.work)
        return {**one.to_dict(), "ttft_s": seconds}

    def _declined(self) -> Counter[tuple[str, str]]:
        mine = (one for one in self._predictions if one.outcome == "declined")
        return Counter((one.policy, one.reason) for one in mine)

    def show(self) -> None:
        screen().print(_table(self._totals))
        for (policy, reason), count in self._declined().items():
            notes().print(f"{policy} declined {count} of its requests: {reason}")
        if self._errors:
            screen().print(_error_table(self._errors))
        if self._basis is None:
            notes().print("no seconds: give --prices or --calibrate")
        else:
            one = self._basis
            notes().print(
                f"seconds: {one.source}, {one.observations} times, "
                f"median error of the fit {one.median_error:.1%}"
            )
        if self._too_long:
            notes().print(f"{self._too_long} requests are longer than {self._name}'s window")


def _table(found: dict[str, Totals]) -> Table:
    columns = ("requests", "hits", "declined", "hit rate", "recomputed", "reused MiB", "stored MiB")
    table = Table()
    table.add_column("policy")
    for column in (*columns, "work", "TTFT s"):
        table.add_column(column, justify="right")
    for name, one in found.items():
        table.add_row(
            name,
            *map(str, (one.requests, one.hits, one.declined)),
            f"{one.hit_rate:.1%}",
            f"{one.active_tokens} of {one.prompt_tokens}",
            f"{one.bytes_reused / MIB:.0f}",
            f"{one.bytes_stored / MIB:.0f}",
            f"{one.work_vs_recompute:.1%}",
            "-" if one.ttft_s is None else f"{one.ttft_s:.2f}",
        )
    return table


def _error_table(found: dict[str, Errors]) -> Table:
    table = Table(title="against the measured run", title_justify="left")
    table.add_column("policy")
    for column in ("rows", "reused", "recomputed", "worst row", "TTFT", "TTFT, median row"):
        table.add_column(column, justify="right")
    for name, one in found.items():
        shares = (one.reused, one.active, one.worst_active, one.ttft, one.ttft_median)
        table.add_row(name, str(one.rows), *("-" if x is None else f"{x:.1%}" for x in shares))
    return table
