"""Replay against the published run of the real model, whose figures stand in docs/results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cacheslide_agents.bench.replay import (
    ReplayModel,
    errors,
    predict,
    read_prices,
    turn_requests,
)
from cacheslide_agents.bench.results import read_results
from cacheslide_agents.bench.runner import window_limits
from cacheslide_agents.bench.workloads import load_turns
from cacheslide_agents.policies import named
from cacheslide_agents.policies.cost import CostModel, Geometry
from cacheslide_agents.prompt.chat import ChatEncoder

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"
SMOLLM2_135M = Geometry(30, 576, 1536, 9, 3, 64)
NEAR = 0.3
"""Two runs at different hours, on a shared machine."""


@pytest.mark.usefixtures("learnt_prices")
def test_predicted_tokens_are_those_of_the_published_memgpt_run(
    data_dir: Path, smollm2_tokenizer: Any
) -> None:
    """And the times to the first token, at prices of another task's run, are not far off."""
    encoder = ChatEncoder(smollm2_tokenizer)
    model = ReplayModel(smollm2_tokenizer, encoder, SMOLLM2_135M, 8192, CostModel(SMOLLM2_135M))
    read_prices(RESULTS / "reflexion.json", model, ("prefix", "cacheslide"))
    limits = window_limits(smollm2_tokenizer, 8192, encoder.encode, 4096)
    turns = load_turns("memgpt", data_dir, limits, limit=2)
    policies = {name: named(name) for name in ("prefix", "cacheslide")}
    rows = read_results(RESULTS / "memgpt.json").rows
    found = errors(predict(turn_requests(turns), model, policies), rows, model.cost, timed=True)
    assert [one.rows for one in found.values()] == [2, 2]
    for one in found.values():
        assert (one.reused, one.active) == (0.0, 0.0)
        assert one.ttft is not None and one.ttft < NEAR
