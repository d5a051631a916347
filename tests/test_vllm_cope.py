"""Models with contextual positions on vLLM, as the torch backend computes them, and densely."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
import torch

from cacheslide_agents.backend import GenerationRequest, Sampling
from cacheslide_agents.bench.metrics import kl_divergence
from cacheslide_agents.errors import (
    DataError,
    ModelLoadError,
    RequestError,
    UnsupportedModelError,
)
from cacheslide_agents.policies import CacheSlide, Recompute
from cacheslide_agents.policies.base import Policy
from cacheslide_agents.position.contextual import CanonicalMass, contextual_attention
from cacheslide_agents.position.profile import CanonicalRows, Profile
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


# Without an engine.


@pytest.fixture
def layer(lab: ModuleType) -> Any:
    """Two key heads, two query heads to each, five positions."""
    from vllm_cacheslide.cope.attention import CopeAttention

    generator = torch.Generator().manual_seed(0)
    embedding = torch.randn(4, 5, 8, generator=generator)
    return CopeAttention(4, 8, 0.3, 2, embedding=embedding, index=0, heads=slice(0, 4))


def sequences(lab: ModuleType, **changes: Any) -> Any:
    from vllm_cacheslide.cope.sequences import SequencesBuilder

    builder = SequencesBuilder(SimpleNamespace(block_size=4), [], None, torch.device("cpu"))
    return builder.build(0, SimpleNamespace(**changes)).each


def test_runs_of_one_request_are_one_sequence(lab: ModuleType, layer: Any) -> None:
    common: dict[str, Any] = {
        "query_start_loc_cpu": torch.tensor([0, 2, 3, 6, 6]),
        "seq_lens_cpu_upper_bound": torch.tensor([3, 6, 9, 0]),
        "block_table_tensor": torch.tensor([[5, 7, 0], [5, 7, 0], [2, 1, 4], [0, 0, 0]]),
        "num_reqs": 4,
    }
    apart = sequences(lab, **common, req_idx=None)
    assert [(s.start, s.stop, s.length) for s in apart] == [(0, 2, 3), (2, 3, 6), (3, 6, 9)]
    joined, other = sequences(lab, **common, req_idx=np.array([3, 3, 1, 0]))
    assert (joined.start, joined.stop, joined.length) == (0, 3, 6)
    assert joined.rows.tolist() == [1, 2, 5]
    assert joined.blocks.tolist() == [5, 7]
    assert other.rows.tolist() == [6, 7, 8]
    assert other.blocks.tolist() == [2, 1, 4]


def test_scattered_blocks_and_padding_are_attended_as_one_row_of_keys(
    lab: ModuleType, layer: Any
) -> None:
    from vllm_cacheslide.cope.sequences import Sequences

    keys, values = torch.randn(2, 10, 2, 8)
    cache = torch.full((6, 2, 4, 16), torch.nan)
    slots = torch.tensor([20, 21, 22, 23, 4, 5, 6, 7, 12, 13])  # blocks 5, 1 and 3
    padded = torch.cat((slots, torch.tensor([-1])))
    layer.do_kv_cache_update(None, *(torch.cat((x, x[:1])) for x in (keys, values)), cache, padded)
    (found,) = sequences(
        lab,
        query_start_loc_cpu=torch.tensor([0, 1, 3]),
        seq_lens_cpu_upper_bound=torch.tensor([4, 10]),
        block_table_tensor=torch.tensor([[5, 1, 3], [5, 1, 3]]),
        num_reqs=2,
        req_idx=np.array([0, 0]),
    )
    query, output = torch.randn(3, 4, 8), torch.zeros(4, 4, 8)
    layer.forward(None, query, None, None, cache, Sequences((found,)), output)
    assert output[:3].allclose(attended(query, keys, values, layer, [3, 8, 9]), atol=1e-5)
    assert not output[3].any()


def test_the_kernel_is_given_pages_and_slots_and_answers_like_torch(
    lab: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it runs; here torch stands in for it."""
    from vllm_cacheslide.cope import attending
    from vllm_cacheslide.cope.sequences import Sequence

    def stand_in(query: Any, key: Any, value: Any, rows: Any, *, slots: Any, **rest: Any) -> Any:
        assert rows.dtype == torch.int32
        keys, values = (each[slots // 4, :, slots % 4].transpose(0, 1) for each in (key, value))
        return contextual_attention(query, keys, values, rows=rows, **rest)

    cache, query, table = torch.randn(6, 2, 4, 16), torch.randn(4, 3, 8), torch.randn(4, 5, 8)
    sequence = Sequence(0, 3, 10, torch.tensor([3, 8, 9]), torch.tensor([5, 1, 3]))
    wanted = attending.attend(query, cache, sequence, table, scale=0.3)
    monkeypatch.setattr(attending, "fused_attention", stand_in)
    monkeypatch.setattr(attending, "_has_kernel", lambda *_: True)
    assert torch.equal(attending.attend(query, cache, sequence, table, scale=0.3), wanted)


def test_a_rank_attends_with_its_own_heads_tables_and_masses(lab: ModuleType, layer: Any) -> None:
    """The second of two; rows 6 and 9 count tokens 2 to 5 at their canonical mass."""
    from vllm_cacheslide.cope.sequences import Sequence, Sequences

    given: dict[str, Any] = {"embedding": layer._embedding[2:], "index": 1, "heads": slice(2, 4)}
    rank = type(layer)(2, 8, 0.3, 1, **given)
    whole = type(layer)(4, 8, 0.3, 2, **{**given, "embedding": layer._embedding, "heads": slice(4)})
    usual = torch.tensor([[0.0] * 4, [0.5, 1.0, 2.5, 3.0]])  # [layers, heads]
    canonical = CanonicalRows((CanonicalMass(2, 6, 6, 10, usual),))
    cache, query = torch.randn(6, 2, 4, 16), torch.randn(3, 4, 8)
    rows, blocks = torch.tensor([3, 6, 9]), torch.tensor([5, 1, 3])
    outputs = []
    for each, heads, held in ((whole, slice(4), cache), (rank, slice(2, 4), cache[:, 1:])):
        step = Sequences((Sequence(0, 3, 10, rows, blocks, canonical),))
        outputs.append(torch.zeros(3, each.num_heads, 8))
        each.forward(None, query[:, heads], None, None, held, step, outputs[-1])
    plain = torch.zeros(3, 4, 8)
    whole.forward(
        None, query, None, None, cache, Sequences((Sequence(0, 3, 10, rows, blocks),)), plain
    )
    assert outputs[1].allclose(outputs[0][:, 2:], atol=1e-6)
    moved = (outputs[0] - plain).abs().amax((1, 2)) > 1e-3
    assert moved.tolist() == [False, True, True]


def attended(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layer: Any, rows: list[int]
) -> torch.Tensor:
    """CoPE by its definition, key by key."""
    wanted = torch.zeros_like(query)
    for index, row in enumerate(rows):
        for head in range(4):
            q, table = query[index, head], layer._embedding[head]
            scores = keys[: row + 1, head // 2] @ q * layer.scale
            places = scores.sigmoid().flip(0).cumsum(0).flip(0).clamp(max=len(table) - 1)
            below = places.floor().long()
            above = (below + 1).clamp(max=len(table) - 1)
            logits = scores + torch.lerp(table[below] @ q, table[above] @ q, places - below)
            wanted[index, head] = logits.softmax(0) @ values[: row + 1, head // 2]
    return wanted


def test_caches_of_eight_bits_are_refused_by_name(layer: Any) -> None:
    given: dict[str, Any] = {"embedding": layer._embedding, "index": 0, "heads": slice(4)}
    with pytest.raises(UnsupportedModelError, match="fp8"):
        type(layer)(4, 8, 0.3, 2, kv_cache_dtype="fp8", **given)


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
