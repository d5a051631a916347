"""The cost model: work, nominal prices, what it learns from times."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread
from types import SimpleNamespace

import numpy as np
import pytest

from cacheslide_agents.errors import RequestError
from cacheslide_agents.policies.cost import CostModel, Geometry
from cacheslide_agents.policies.fit import fit_seconds
from cacheslide_agents.policies.work import Work

pytestmark = pytest.mark.usefixtures("learnt_prices")

SIZES = {
    "layers": 30,
    "hidden": 576,
    "intermediate": 1536,
    "heads": 9,
    "kv_heads": 3,
    "head_dim": 64,
}
TRUE = np.array([2e-3, 3e-6, 4e-10, 2e-8, 5e-3])
"""Seconds per pass, row, pair, loaded token and selection."""


def model() -> CostModel:
    return CostModel.from_geometry(**SIZES)


def sparse(seed: int) -> Work:
    """A few hundred active rows of a prompt, the others loaded."""
    rng = np.random.default_rng(seed)
    length = int(rng.integers(300, 4000))
    rows = np.flatnonzero(rng.random(length) < rng.random())
    loaded = float((length - len(rows)) * 30)
    reuse = Work(0.0, 0.0, loaded, float(seed % 2))
    return Work.total(Work.of(rows, 30), reuse)


def taught(seconds: Callable[[int, Work], float], rounds: int = 120) -> CostModel:
    learning = model()
    for seed in range(rounds):
        learning.observe(sparse(seed), seconds(seed, sparse(seed)))
    return learning


def worst_error(learnt: CostModel) -> float:
    """Largest relative error on work it has not seen."""
    ratios = [
        learnt.predict(work) / float(TRUE @ work.vector())
        for work in (sparse(seed) for seed in range(1000, 1100))
    ]
    return float(np.abs(np.array(ratios) - 1.0).max())


def test_work_counts_rows_and_the_keys_each_attends_to() -> None:
    assert Work.of(np.array([2, 5]), 3) == Work(rows=6.0, pairs=(3 + 6) * 3.0)


def test_dense_work_has_half_the_square_of_pairs() -> None:
    assert Work.of(np.arange(100), 1) == Work(100.0, 100 * 101 / 2)


def test_nominal_prices_are_operation_counts() -> None:
    row, pair = Geometry(**SIZES).nominal()[1:3] * 1e11
    projections = 576 * 9 * 64 * 2 + 576 * 3 * 64 * 2
    assert row == pytest.approx(2 * (projections + 3 * 576 * 1536))
    assert pair == pytest.approx(2 * 2 * 9 * 64)


def test_twice_the_rows_cost_nearly_twice_before_anything_was_observed() -> None:
    one, two = (model().predict(Work(rows, 0.0)) for rows in (30_000.0, 60_000.0))
    assert 1.9 < two / one < 2.0


def test_a_config_is_read_by_its_field_names() -> None:
    config = SimpleNamespace(
        num_hidden_layers=30,
        hidden_size=576,
        intermediate_size=1536,
        num_attention_heads=9,
        num_key_value_heads=3,
    )
    assert Geometry.from_config(config) == Geometry(**SIZES)
    assert CostModel.from_config(config).layers == 30


def test_a_config_without_grouped_heads_has_as_many_key_as_query_heads() -> None:
    config = SimpleNamespace(
        num_hidden_layers=2,
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=None,
        head_dim=32,
    )
    geometry = Geometry.from_config(config)
    assert (geometry.kv_heads, geometry.head_dim) == (4, 32)


def test_a_geometry_with_a_zero_size_is_refused() -> None:
    with pytest.raises(RequestError, match="layers=0"):
        Geometry(**{**SIZES, "layers": 0})


def test_planted_prices_are_recovered_from_clean_times() -> None:
    learnt = taught(lambda _, work: float(TRUE @ work.vector()))
    assert worst_error(learnt) < 0.02


def test_noise_of_a_tenth_leaves_predictions_within_a_tenth() -> None:
    noise = np.random.default_rng(1).lognormal(0.0, 0.1, 120)
    learnt = taught(lambda i, work: float(TRUE @ work.vector()) * noise[i])
    assert worst_error(learnt) < 0.1


def test_one_time_in_ten_that_is_ten_times_too_long_hardly_matters() -> None:
    learnt = taught(lambda i, work: float(TRUE @ work.vector()) * (10 if i % 10 == 3 else 1))
    assert worst_error(learnt) < 0.05


def test_one_observation_sets_the_speed_and_leaves_the_ratios() -> None:
    fresh, seen = model(), model()
    a, b = sparse(1), sparse(2)
    seen.observe(a, 7 * fresh.predict(a))
    assert seen.predict(a) == pytest.approx(7 * fresh.predict(a))
    assert seen.predict(b) / seen.predict(a) == pytest.approx(fresh.predict(b) / fresh.predict(a))


def test_old_observations_are_forgotten() -> None:
    learnt = taught(lambda _, work: 50 * float(TRUE @ work.vector()), rounds=60)
    for seed in range(200):
        learnt.observe(sparse(seed), float(TRUE @ sparse(seed).vector()))
    assert worst_error(learnt) < 0.02


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_a_time_that_is_none_is_ignored(seconds: float) -> None:
    learning = model()
    before = learning.predict(sparse(1))
    learning.observe(sparse(1), seconds)
    assert learning.predict(sparse(1)) == before


def test_prices_are_never_negative() -> None:
    rng = np.random.default_rng(0)
    features = rng.random((40, 5)) + 0.1
    seconds = np.maximum(1e-3, features @ np.array([1.0, -2.0, 3.0, -0.5, 0.1]))
    prices = fit_seconds(features, seconds, np.ones(5))
    assert (prices >= 0).all()
    assert (prices == 0).any()


def test_loads_that_prove_slow_turn_the_comparison() -> None:
    compute, load = Work(30 * 1500.0, 30 * 1e6), Work(30 * 100.0, 30 * 1e5, 30 * 1400.0, 1.0)
    fresh = model()
    assert fresh.predict(load) < fresh.predict(compute)
    slow = TRUE * np.array([1, 1, 1, 1000, 1])
    learnt = taught(lambda _, work: float(slow @ work.vector()))
    assert learnt.predict(load) > learnt.predict(compute)


def test_threads_may_observe_and_predict_at_once() -> None:
    shared = model()
    works = [sparse(seed) for seed in range(40)]

    def teach() -> None:
        for work in works:
            shared.observe(work, float(TRUE @ work.vector()))
            shared.predict(work)

    threads = [Thread(target=teach) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert worst_error(shared) < 0.05
