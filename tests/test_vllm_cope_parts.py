"""Contextual attention over vLLM's pages, without an engine: sequences, masses, ranks' heads."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from cacheslide_agents.errors import UnsupportedModelError
from cacheslide_agents.position.contextual import CanonicalMass
from cacheslide_agents.position.profile import CanonicalRows

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own, at its import


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
    lab: ModuleType, monkeypatch: pytest.MonkeyPatch, support: Callable[[str], ModuleType]
) -> None:
    """Where it runs; here torch stands in for it."""
    from vllm_cacheslide.cope import attending
    from vllm_cacheslide.cope.sequences import Sequence

    cache, query, table = torch.randn(6, 2, 4, 16), torch.randn(4, 3, 8), torch.randn(4, 5, 8)
    sequence = Sequence(0, 3, 10, torch.tensor([3, 8, 9]), torch.tensor([5, 1, 3]))
    wanted = attending.attend(query, cache, sequence, table, scale=0.3)
    stand_in = support("kernel_stand_in").StandIn()
    monkeypatch.setattr(attending, "fused_attention", stand_in)
    monkeypatch.setattr(attending, "trusted_on_pages", lambda *_, **__: True)
    assert torch.equal(attending.attend(query, cache, sequence, table, scale=0.3), wanted)
    assert stand_in.calls == [(3, True, True)]


@pytest.mark.parametrize("kind", ["fused", "masked"])
def test_a_cope_model_takes_no_other_attention(lab: ModuleType, kind: Any) -> None:
    from vllm_cacheslide.assembly import _attention
    from vllm_cacheslide.cope.runs import CopeRuns

    nothing: Any = None
    runs = CopeRuns.__new__(CopeRuns)
    assert _attention("runs", runs, nothing, nothing) is runs
    with pytest.raises(UnsupportedModelError, match=f"attention='{kind}': a CoPE model has"):
        _attention(kind, runs, nothing, nothing)


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
