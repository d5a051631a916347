"""Models with contextual positions on vLLM, as the torch backend computes them, and densely."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any
from uuid import uuid4

import numpy as np
import pytest

from cacheslide_agents.backend import GenerationRequest, Sampling
from cacheslide_agents.bench.metrics import kl_divergence
from cacheslide_agents.errors import (
    DataError,
    ModelLoadError,
    RequestError,
)
from cacheslide_agents.policies import CacheSlide, Recompute
from cacheslide_agents.policies.base import Policy
from cacheslide_agents.position.profile import Profile
from cacheslide_agents.selection import Boundary, Everything, KeyDeviation
from torch_cacheslide import TorchBackend

ALL = CacheSlide(selector=Everything(), may_decline=False)
POLICIES: dict[str, Policy] = {
    "default": CacheSlide(may_decline=False),
    "nothing": CacheSlide(selector=None, may_decline=False),
    "boundary": CacheSlide(selector=Boundary(16), may_decline=False),
    "deviation": CacheSlide(selector=KeyDeviation(1, 0.26), may_decline=False),
}
Turn = Callable[..., GenerationRequest]
FORCED = (7, 300, 12, 41)
LENGTHS = (12, 140, 700)
"""Fewer tokens than positions (16), more; and more than vLLM takes in a step (256)."""

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),  # vLLM's and its packages' own
]


@pytest.fixture(scope="module")
def vllm_backend(lab: ModuleType) -> Any:
    return lab.engine("cope")


@pytest.fixture(scope="module")
def torch_backend(lab: ModuleType, vllm_backend: Any) -> Iterator[TorchBackend]:
    profiles = lab.cope_profiles()
    backend = TorchBackend(lab.model_of(vllm_backend), dtype="float32", profiles=profiles)
    yield backend
    backend.close()


@pytest.fixture
def namespace() -> str:
    return uuid4().hex


@pytest.fixture
def turn(lab: ModuleType, namespace: str) -> Turn:
    """A turn whose tokens 100 to `cut` are its update."""

    def made(ids: list[int], cut: int, policy: Policy, task: str = "plain") -> GenerationRequest:
        sampling = Sampling(max_tokens=12, ignore_eos=True, logprobs=0)
        common: dict[str, Any] = {"task": task, "sampling": sampling, "retain": False}
        return GenerationRequest(ids, lab.parts(ids, cut), namespace, policy=policy, **common)

    return made


def test_the_engine_reuses(vllm_backend: Any) -> None:
    assert vllm_backend.off == ""


@pytest.mark.parametrize("length", LENGTHS)
def test_dense_answers_are_those_of_the_torch_backend(
    lab: ModuleType, vllm_backend: Any, torch_backend: TorchBackend, namespace: str, length: int
) -> None:
    ids, _ = lab.turns(length, length)
    asked = lab.request(ids[:length], Recompute(), namespace=namespace)
    reference = lab.ask(torch_backend, asked)
    assert lab.ask(vllm_backend, asked).equals(reference)


def test_an_unchanged_prompt_is_loaded_and_equals_dense(
    lab: ModuleType, vllm_backend: Any, namespace: str
) -> None:
    ids, _ = lab.turns(50, 700)
    dense = lab.ask(vllm_backend, lab.request(ids, Recompute(), namespace=namespace))
    policy = POLICIES["default"]
    lab.ask(vllm_backend, lab.request(ids, policy, namespace=namespace, retain=True))
    lab.forget_prefixes(vllm_backend)
    same = lab.ask(vllm_backend, lab.request(ids, policy, namespace=namespace))
    assert same.receipt.outcome == "hit"
    assert same.receipt.active_tokens == 1
    assert same.equals(dense)


def test_a_moved_prompt_that_is_all_recomputed_equals_dense(
    lab: ModuleType, vllm_backend: Any, namespace: str
) -> None:
    first, second = lab.turns(51, 700)
    dense = lab.ask(vllm_backend, lab.request(second, Recompute(), namespace=namespace))
    lab.ask(vllm_backend, lab.request(first, ALL, namespace=namespace, retain=True))
    lab.forget_prefixes(vllm_backend)
    again = lab.ask(vllm_backend, lab.request(second, ALL, namespace=namespace))
    assert again.receipt.outcome == "partial"
    assert again.equals(dense)


@pytest.mark.parametrize("task", ["plain", "profiled"])
@pytest.mark.parametrize("name", POLICIES)
def test_both_backends_compute_the_same_rows_and_stray_as_far_from_dense(
    lab: ModuleType,
    vllm_backend: Any,
    torch_backend: TorchBackend,
    turn: Turn,
    name: str,
    task: str,
) -> None:
    """Also where what is reused was computed under a CCPE profile."""
    policy = POLICIES[name]
    first, second = lab.turns(60, 500)
    found, strayed = [], []
    for backend in (torch_backend, vllm_backend):
        dense = backend.score(turn(second, 137, Recompute(), task), FORCED)
        backend.warm(turn(first, 120, policy, task))
        found.append(backend.score(turn(second, 137, policy, task), FORCED))
        strayed.append(kl_divergence(dense.logprobs, found[-1].logprobs))
    reference, ours = found
    assert ours.receipt.outcome == reference.receipt.outcome == "hit"
    assert ours.receipt.active_tokens == reference.receipt.active_tokens
    assert ours.receipt.reused_tokens == reference.receipt.reused_tokens
    assert ours.receipt.chunks == reference.receipt.chunks
    assert strayed[0] > 1e-4  # reuse is no dense run
    assert strayed[1] == pytest.approx(strayed[0], abs=1e-4)
    assert np.abs(ours.logprobs - reference.logprobs).max() < 1e-3


@pytest.mark.parametrize("length", [7, 140, 500])
def test_a_first_prefill_under_a_profile_is_that_of_the_torch_backend(
    lab: ModuleType, vllm_backend: Any, torch_backend: TorchBackend, turn: Turn, length: int
) -> None:
    """Tokens of the chunk behind the update, but for the prompt's last one."""
    ids = lab.turns(62, 600)[0][: 120 + length]
    plain = vllm_backend.score(turn(ids, 120, POLICIES["default"]), FORCED)
    reference, ours = (
        backend.score(turn(ids, 120, POLICIES["default"], lab.PROFILED), FORCED)
        for backend in (torch_backend, vllm_backend)
    )
    assert ours.receipt.outcome == reference.receipt.outcome == "cold"
    assert ours.receipt.ccpe == reference.receipt.ccpe == length - 1
    assert not ours.receipt.exact
    assert np.abs(ours.logprobs - reference.logprobs).max() < 1e-3
    assert np.abs(ours.logprobs - plain.logprobs).max() > 1e-2


def test_a_profile_that_is_switched_off_or_of_another_task_changes_nothing(
    lab: ModuleType, vllm_backend: Any, turn: Turn
) -> None:
    ids, _ = lab.turns(63, 500)
    dense = vllm_backend.score(turn(ids, 120, Recompute(), lab.PROFILED), FORCED)
    off = vllm_backend.score(turn(ids, 120, CacheSlide(ccpe=False), lab.PROFILED), FORCED)
    other = vllm_backend.score(turn(ids, 120, CacheSlide()), FORCED)
    for found in (dense, off, other):
        assert found.receipt.ccpe == 0
        assert np.abs(found.logprobs - dense.logprobs).max() < 1e-4


def test_answers_after_reuse_go_on_as_those_of_the_torch_backend(
    lab: ModuleType, vllm_backend: Any, torch_backend: TorchBackend, turn: Turn
) -> None:
    """Twelve tokens, across the end of one of vLLM's blocks, over keys that were loaded."""
    policy = POLICIES["default"]
    first, second = (each[:-27] for each in lab.turns(61, 500))
    assert len(second) // lab.BLOCK < (len(second) + lab.TOKENS - 1) // lab.BLOCK
    answers = []
    for backend in (torch_backend, vllm_backend):
        backend.warm(turn(first, 120, policy))
        answers.append(lab.ask(backend, turn(second, 137, policy)))
    reference, ours = answers
    assert ours.receipt.outcome == "hit"
    assert ours.receipt.reused_tokens > 300
    assert ours.equals(reference)


def test_requests_that_run_together_are_answered_as_alone(
    lab: ModuleType, vllm_backend: Any, namespace: str
) -> None:
    policy = POLICIES["boundary"]
    prompts = [lab.turns(seed, 200 + 60 * seed) for seed in range(3)]
    for first, _ in prompts:
        lab.ask(vllm_backend, lab.request(first, policy, namespace=namespace, retain=True))
    asked = [lab.request(second, policy, namespace=namespace) for _, second in prompts]
    asked.append(lab.request(prompts[0][1], Recompute(), namespace=namespace))
    alone = [lab.ask(vllm_backend, each) for each in asked]
    together = lab.ask_together(vllm_backend, asked)
    assert [each.receipt.outcome for each in alone[:3]] == ["partial"] * 3
    for one, other in zip(alone, together, strict=True):
        assert other.equals(one)


def test_profiles_that_do_not_fit_are_refused_before_the_engine_starts(
    lab: ModuleType, tmp_path: Path
) -> None:
    from vllm_cacheslide.backend import VllmBackend

    profiles = lab.cope_profiles()
    with pytest.raises(RequestError, match="CoPE"):
        VllmBackend(str(lab.tiny_model()), profiles=profiles)
    with pytest.raises(DataError, match="no-such-file"):
        VllmBackend(str(lab.cope_model()), profiles="no-such-file")
    (written,) = profiles.iterdir()
    replace(Profile.read(written), model="another").save(tmp_path)
    with pytest.raises(ModelLoadError, match="another model"):
        VllmBackend(str(lab.cope_model()), profiles=tmp_path)
