"""Replay against the real thing: the same requests through a tiny model and as tokens only."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner

from cacheslide_agents.backend import GenerationRequest, Sampling
from cacheslide_agents.bench.measure import REFERENCE, Bench
from cacheslide_agents.bench.replay import (
    Prediction,
    ReplayModel,
    errors,
    measure_prices,
    predict,
    read_trace,
    totals,
    turn_requests,
)
from cacheslide_agents.bench.results import Row
from cacheslide_agents.bench.runner import window_limits
from cacheslide_agents.bench.workloads import Turn, load_turns
from cacheslide_agents.cli.commands import app
from cacheslide_agents.policies import CacheSlide, Policy, Population, named
from cacheslide_agents.prompt.chat import ChatEncoder
from cacheslide_agents.prompt.logged import LoggedRequest, messages_record, read_request
from cacheslide_agents.selection import Affinity, KeyCosine
from torch_cacheslide import TorchBackend

POLICIES: dict[str, Policy] = {
    **{name: named(name) for name in (REFERENCE, "prefix", "prompt_cache", "cache_blend", "epic")},
    **{name: named(name) for name in ("cache_blend_context", "epic_context")},
    "cacheslide": CacheSlide(may_decline=False),
}
TASKS = ("reflexion", "swe_agent", "append")


@pytest.fixture(scope="module")
def model(tiny_model: str) -> ReplayModel:
    return ReplayModel.read(Path(tiny_model))


@pytest.fixture(scope="module")
def backend(tiny_model: str) -> Iterator[TorchBackend]:
    backend = TorchBackend(tiny_model, device="cpu")
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def data(support: Callable[[str], ModuleType], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = support("tiny_data").write_tiny_data(tmp_path_factory.mktemp("data"))
    return folder


@pytest.fixture(scope="module")
def turns(data: Path, model: ReplayModel) -> list[Turn]:
    limits = window_limits(model.tokenizer, model.window, model.encoder.encode, 4096)
    return [turn for task in TASKS for turn in load_turns(task, data, limits, limit=2)]


@pytest.fixture(scope="module")
def measured(backend: TorchBackend, turns: list[Turn]) -> list[Row]:
    bench = Bench(backend, ChatEncoder(backend.tokenizer).encode, answer_tokens=0, kl_tokens=1)
    populated = [bench.populate(turn, POLICIES) for turn in turns]
    return [row for one in populated for row in bench.measure(one, POLICIES)]


@pytest.fixture(scope="module")
def predicted(turns: list[Turn], model: ReplayModel) -> list[Prediction]:
    return list(predict(turn_requests(turns), model, POLICIES))


def test_token_counts_are_those_of_a_real_run_under_every_policy(
    measured: list[Row], predicted: list[Prediction]
) -> None:
    names = ("prompt_tokens", "reused_tokens", "active_tokens", "outcome", "compute_fraction")
    real = [tuple(getattr(row, name) for name in names) for row in measured]
    assert [tuple(getattr(one, name) for name in names) for one in predicted] == real
    assert {one.outcome for one in predicted} >= {"cold", "hit", "partial"}


def test_the_papers_policy_has_the_right_number_of_tokens_up_to_its_gate(
    backend: TorchBackend, turns: list[Turn], model: ReplayModel
) -> None:
    policies = {REFERENCE: named(REFERENCE), "cacheslide_paper": named("cacheslide_paper")}
    bench = Bench(backend, ChatEncoder(backend.tokenizer).encode, answer_tokens=0, kl_tokens=1)
    rows = [
        row for turn in turns for row in bench.measure(bench.populate(turn, policies), policies)
    ]
    found = errors(predict(turn_requests(turns), model, policies), rows, model.cost, timed=False)
    assert found["cacheslide_paper"].rows == len(turns)
    assert found["cacheslide_paper"].active < 0.15


def test_errors_are_relative_to_the_measured_run(
    measured: list[Row], predicted: list[Prediction], model: ReplayModel
) -> None:
    found = errors(predicted, measured, model.cost, timed=False)
    assert set(found) == set(POLICIES)
    assert {(one.reused, one.active, one.worst_active) for one in found.values()} == {(0, 0, 0)}
    assert found["prefix"].ttft is None
    doubled = errors(predicted[:1], [replace(measured[0], active_tokens=1)], model.cost, timed=True)
    assert doubled[REFERENCE].active == predicted[0].active_tokens - 1
    assert doubled[REFERENCE].ttft is not None


def test_a_session_of_growing_messages_is_planned_as_a_backend_plans_it(
    backend: TorchBackend, model: ReplayModel, tmp_path: Path
) -> None:
    """Requests one after the other, each kept with its answer, in two sessions and a namespace."""
    system = {"role": "system", "content": "Be brief. " * 40}
    said = [{"role": "user", "content": f"Say {n} again and again, please. " * 8} for n in range(4)]
    records: list[dict[str, Any]] = [
        {"messages": [system, *said[:2]], "user": "ann"},
        {"messages": [system, said[2]], "user": "bob"},
        {"messages": [system, *said[:2], said[3]], "user": "ann"},
        {"messages": [system, *said[:2], said[3]], "user": "ann", "namespace": "other"},
        {"messages": [system, said[3], *said[:2]], "user": "ann", "retain": False},
        {"messages": [system, said[0]], "user": "bob"},
    ]
    policy = CacheSlide(may_decline=False)
    real, lines = [], []
    for record in records:
        request = read_request(record, "here")
        prompt = request.encode(model.encoder)
        asked = GenerationRequest(
            prompt.ids,
            prompt.spans,
            namespace=request.namespace,
            task=prompt.task,
            session=request.session,
            sampling=Sampling(max_tokens=4, ignore_eos=True),
            policy=policy,
            retain=request.retain,
        )
        chunks = list(backend.generate(asked))
        receipt = chunks[-1].receipt
        assert receipt is not None
        real.append((receipt.reused_tokens, receipt.active_tokens, receipt.exact))
        kept = [token for chunk in chunks for token in chunk.token_ids][:-1]
        lines.append(json.dumps({**record, "output_ids": kept}))
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(lines), encoding="utf-8")
    found = list(predict(read_trace(trace), model, {"cacheslide": policy}))
    assert [(one.reused_tokens, one.active_tokens, one.exact) for one in found] == real
    assert [one.where for one in found] == [f"{trace}:{n}" for n in range(1, 7)]
    assert found[3].reused_tokens == 0


def test_bytes_are_those_of_keys_and_values_of_all_layers(
    model: ReplayModel, predicted: list[Prediction], backend: TorchBackend
) -> None:
    layers, kv_heads, head_dim = backend.layers, 2, 16
    assert model.token_bytes == 2 * layers * kv_heads * head_dim * 4
    for one in predicted:
        assert one.bytes_reused == one.reused_tokens * model.token_bytes
        assert one.bytes_stored == 0  # measured turns are not kept
    record = {"messages": [{"role": "user", "content": "Hello there"}], "output_ids": [1, 2, 3]}
    (cold,) = predict([read_request(record, "x")], model, {"prefix": named("prefix")})
    assert cold.bytes_stored == (cold.prompt_tokens + 3) * model.token_bytes


def test_a_full_store_forgets_the_oldest_request(model: ReplayModel) -> None:
    texts = [f"Number {n} is the one we speak of today. " * 10 for n in (1, 2, 1)]
    requests = [
        read_request({"messages": [{"role": "user", "content": text}]}, str(n))
        for n, text in enumerate(texts)
    ]
    policies = {"prefix": named("prefix")}
    roomy = [one.reused_tokens for one in predict(requests, model, policies)]
    one_prompt = len(requests[0].encode(model.encoder).ids) * model.token_bytes
    tight = predict(requests, model, policies, store_bytes=one_prompt)
    assert roomy[2] == len(requests[2].encode(model.encoder).ids) - 1
    first, second = (request.encode(model.encoder).ids for request in requests[:2])
    head = next(i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    assert [one.reused_tokens for one in tight] == [0, head, head]


def test_totals_add_up_over_requests(predicted: list[Prediction], model: ReplayModel) -> None:
    found = totals(predicted, model.cost, timed=False)
    assert list(found) == list(POLICIES)
    dense, slide = found[REFERENCE], found["cacheslide"]
    assert dense.work_vs_recompute == pytest.approx(1.0)
    assert dense.compute_fraction == 1.0
    assert slide.reused_tokens + slide.active_tokens == slide.prompt_tokens == dense.prompt_tokens
    assert slide.hit_rate == slide.reused_tokens / slide.prompt_tokens
    assert slide.ttft_s is None
    mine = [one for one in predicted if one.policy == "cacheslide"]
    seconds = sum(model.cost.predict(one.work) for one in mine)
    timed = totals(predicted, model.cost, timed=True)
    assert timed["cacheslide"].ttft_s == pytest.approx(seconds)


@pytest.mark.usefixtures("learnt_prices")
def test_prices_can_be_measured_on_requests_of_the_trace(
    backend: TorchBackend, turns: list[Turn], tiny_model: str
) -> None:
    fresh = ReplayModel.read(Path(tiny_model))
    before = [fresh.cost.predict(one.work) for one in _some(turns, fresh)]
    policies = {"prefix": named("prefix"), "cacheslide": CacheSlide(may_decline=False)}
    basis = measure_prices(backend, list(turn_requests(turns[:3])), fresh, policies)
    assert basis.observations == 2 * (6 - 1)  # both policies; the first request warms up
    assert backend.model_id in basis.source
    assert [fresh.cost.predict(one.work) for one in _some(turns, fresh)] != before


def _some(turns: list[Turn], model: ReplayModel) -> list[Prediction]:
    return list(predict(turn_requests(turns[:2]), model, {"prefix": named("prefix")}))


def test_a_policy_that_reads_keys_before_the_run_falls_back(model: ReplayModel) -> None:
    policy = CacheSlide(selector=Affinity(0.1, (KeyCosine(),)), may_decline=False)
    text = "Some words that stay where they are. " * 20
    requests = [
        LoggedRequest("x", "x", read_request({"messages": m}, "x").prompt)
        for m in (
            [{"role": "user", "content": f"First. {text}"}],
            [{"role": "user", "content": f"Then something else. {text}"}],
        )
    ]
    first, second = predict(requests, model, {"c": policy})
    assert (first.outcome, second.outcome) == ("cold", "fallback")
    assert "a replay knows tokens only" in second.reason


def test_replay_command_predicts_a_workload_and_compares_it_with_a_run(
    tiny_model: str, data: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run.json"
    workload = ["--task", "reflexion", "--data", str(data), "--limit", "2", "--model", tiny_model]
    common = [*workload, "--policies", "prefix,epic_context"]
    ran = CliRunner().invoke(app, ["bench", *common, "--no-answers", "--out", str(out)])
    assert ran.exit_code == 0, ran.output
    options = ["--against", str(out), "--prices", str(out), "--json"]
    result = CliRunner().invoke(app, ["replay", *common, *options])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert {name: one["active"] for name, one in found["errors"].items()} == {
        "prefix": 0,
        "epic_context": 0,
    }
    assert found["basis"]["observations"] == 2 * 3
    assert all(one["ttft_s"] > 0 for one in found["requests"])
    table = CliRunner().invoke(app, ["replay", *workload, "--policies", "prefix"])
    assert "prefix" in table.stdout
    assert "no seconds: give --prices or --calibrate" in table.stderr


def test_replay_command_calibrates_on_the_trace_and_counts_what_is_too_long(
    tiny_model: str, model: ReplayModel, tmp_path: Path
) -> None:
    trace = tmp_path / "log.jsonl"
    text = "Some words that stay where they are. " * 20
    asked = [{"messages": [{"role": "user", "content": f"{n}. {text}"}]} for n in range(3)]
    trace.write_text("\n".join(map(json.dumps, asked)), encoding="utf-8")
    options = ["--model", tiny_model, "--policies", "prefix", "--json"]
    result = CliRunner().invoke(app, ["replay", str(trace), *options, "--calibrate"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["basis"]["source"].startswith("measured on")
    assert found["basis"]["observations"] == 2
    assert found["totals"]["prefix"]["ttft_s"] > 0
    assert found["over_window"] == 0
    long = {"prompt_ids": [1] * model.window}
    trace.write_text(json.dumps(long), encoding="utf-8")
    result = CliRunner().invoke(app, ["replay", str(trace), *options])
    assert json.loads(result.stdout)["over_window"] == 1


def test_population_of_every_policy_is_replayed() -> None:
    assert {policy.population for policy in POLICIES.values()} == set(Population)


def test_a_turn_survives_being_written_to_a_log(turns: list[Turn], model: ReplayModel) -> None:
    for turn in turns:
        record = json.loads(json.dumps(messages_record(turn.measure, id="one")))
        again = read_request(record, "here")
        assert again.prompt == turn.measure
        assert again.encode(model.encoder) == model.encoder.encode(turn.measure)
