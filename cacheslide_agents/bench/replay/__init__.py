"""What reuse would make of a log of requests, without running a model.

    model = ReplayModel.read(folder)
    predictions = list(predict(read_trace("log.jsonl"), model, {"cacheslide": CacheSlide()}))
    totals(predictions, model.cost, timed=False)

`read_trace` reads requests, `predict` plans each of them with the planner that backends use, over
contexts of which only the tokens are known, `prices` gives the cost model seconds, and `totals`
adds up.
"""

from cacheslide_agents.bench.replay.model import ReplayModel
from cacheslide_agents.bench.replay.predict import Prediction, predict
from cacheslide_agents.bench.replay.prices import Basis, measure_prices, read_prices
from cacheslide_agents.bench.replay.totals import Errors, Totals, errors, totals
from cacheslide_agents.bench.replay.trace import turn_requests
from cacheslide_agents.prompt.logged import read_trace

__all__ = [
    "Basis",
    "Errors",
    "Prediction",
    "ReplayModel",
    "Totals",
    "errors",
    "measure_prices",
    "predict",
    "read_prices",
    "read_trace",
    "totals",
    "turn_requests",
]
