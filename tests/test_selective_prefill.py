"""Selective prefill against dense runs of transformers itself, on tiny random models.

Reference: the same weights run by transformers with its own attention, on the whole prompt.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from cacheslide_agents.backend import GenerationRequest
from cacheslide_agents.chunks import Role, Span
from cacheslide_agents.errors import ModelError, RequestError
from cacheslide_agents.pages.store import MemoryStore
from cacheslide_agents.policies import (
    CacheBlend,
    CacheSlide,
    Epic,
    Policy,
    Prefix,
    PromptCache,
    Recompute,
    named,
)
from cacheslide_agents.policies.cost import CostModel
from cacheslide_agents.policies.work import Work
from cacheslide_agents.position.rotary import Rotary
from cacheslide_agents.selection import Affinity, CkSimGate, Everything, KeyCosine, KeyDeviation
from torch_cacheslide.attention import ATTENTION_NAME, register_attention
from torch_cacheslide.prompted import Prompted
from torch_cacheslide.runtime import Runtime
from torch_cacheslide.stack import DecoderStack

VOCABULARY = 211
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
FAMILIES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SIZES)),
    "llama3_rope": (LlamaForCausalLM, LlamaConfig(**SIZES, rope_parameters=LLAMA3_ROPE)),
    "mistral": (MistralForCausalLM, MistralConfig(**SIZES, head_dim=8, sliding_window=None)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SIZES)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SIZES, head_dim=16)),
}


@dataclass
class Rig:
    """One model twice: ours, and transformers' own as the reference."""

    runtime: Runtime
    reference: Any

    def dense(self, ids: npt.NDArray[np.int64]) -> torch.Tensor:
        """[n, vocabulary], by transformers."""
        with torch.inference_mode():
            logits: torch.Tensor = self.reference(input_ids=torch.from_numpy(ids)[None]).logits[0]
        return logits

    def turn(
        self,
        ids: npt.NDArray[np.int64],
        policy: Policy,
        borders: tuple[int, ...] = (),
        room: int = 8,
    ) -> Prompted:
        request = GenerationRequest(ids.tolist(), spans_of(ids, borders))
        with torch.inference_mode():
            return self.runtime.prefill(request, policy, room)

    def populate(
        self, ids: npt.NDArray[np.int64], policy: Policy, borders: tuple[int, ...] = ()
    ) -> None:
        with torch.inference_mode():
            self.runtime.remember(self.turn(ids, policy, borders), [])


def spans_of(ids: npt.NDArray[np.int64], borders: tuple[int, ...]) -> tuple[Span, ...]:
    ends = [0, *borders, len(ids)]
    return tuple(
        Span(f"chunk-{i}", Role.REUSE, a, b, str(ids[a:b].tolist()))
        for i, (a, b) in enumerate(itertools.pairwise(ends))
    )


def make_rig(family: str, dtype: torch.dtype = torch.float32) -> Rig:
    register_attention()
    model_class, config = FAMILIES[family][0], deepcopy(FAMILIES[family][1])
    torch.manual_seed(0)
    reference = model_class(config).to(dtype).eval()
    for parameter in reference.parameters():
        parameter.requires_grad_(False)
    ours = (
        model_class._from_config(deepcopy(config), attn_implementation=ATTENTION_NAME)
        .to(dtype)
        .eval()
    )
    ours.load_state_dict(reference.state_dict())
    stack = DecoderStack(ours)
    runtime = Runtime(
        stack,
        Rotary.from_config(config),
        MemoryStore(1 << 30),
        CostModel.from_config(config),
        "tiny",
    )
    return Rig(runtime, reference)


@pytest.fixture(params=list(FAMILIES))
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    yield make_rig(request.param)


def tokens(seed: int, count: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng(seed).integers(3, VOCABULARY, count)


HEAD, OLD, TAIL = tokens(1, 40), tokens(2, 30), tokens(3, 90)
BEFORE = np.concatenate([HEAD, OLD, TAIL, tokens(9, 3)])
LONGER = np.concatenate([HEAD, tokens(4, 47), TAIL, tokens(8, 3)])
SHORTER = np.concatenate([HEAD, tokens(5, 11), TAIL, tokens(8, 3)])
EVERYTHING = CacheSlide(selector=Everything(), may_decline=False)


def assert_continues_like_dense(rig: Rig, turn: Prompted, ids: npt.NDArray[np.int64]) -> None:
    """Last prompt row and five forced tokens, 1e-3 absolute; the same greedy tokens."""
    more = tokens(77, 5)
    expected = rig.dense(np.concatenate([ids, more]))[len(ids) - 1 :]
    with torch.inference_mode():
        continued = rig.runtime.continuation(turn).append(more.tolist())
    got = torch.cat([turn.prefilled.logits, continued])
    torch.testing.assert_close(got, expected, atol=1e-3, rtol=0)
    assert got.argmax(-1).tolist() == expected.argmax(-1).tolist()


def test_a_cold_prompt_equals_transformers(rig: Rig) -> None:
    turn = rig.turn(BEFORE, Recompute())
    assert turn.receipt.outcome == "cold"
    assert_continues_like_dense(rig, turn, BEFORE)


@pytest.mark.parametrize(
    "policy", [Prefix(), CacheSlide(), CacheSlide.paper()], ids=lambda p: p.name
)
def test_the_same_prompt_again_computes_one_token_and_equals_dense(
    rig: Rig, policy: Policy
) -> None:
    rig.populate(BEFORE, policy)
    turn = rig.turn(BEFORE, policy)
    assert (turn.receipt.outcome, turn.receipt.active_tokens) == ("hit", 1)
    assert turn.receipt.exact
    assert_continues_like_dense(rig, turn, BEFORE)


@pytest.mark.parametrize("ids", [LONGER, SHORTER], ids=["right", "left"])
def test_a_shifted_prompt_with_every_hit_corrected_equals_dense(
    rig: Rig, ids: npt.NDArray[np.int64]
) -> None:
    rig.populate(BEFORE, EVERYTHING)
    turn = rig.turn(ids, EVERYTHING)
    assert turn.receipt.outcome in ("hit", "partial")
    assert turn.receipt.active_tokens == len(ids) - len(HEAD)
    assert_continues_like_dense(rig, turn, ids)


@pytest.mark.parametrize("ids", [LONGER, SHORTER], ids=["right", "left"])
@pytest.mark.parametrize(
    "policy", [CacheBlend(fraction=1.0), Epic(tokens=math.inf)], ids=lambda p: p.name
)
def test_isolated_policies_with_a_full_budget_equal_dense(
    rig: Rig, ids: npt.NDArray[np.int64], policy: Policy
) -> None:
    old, new = (40, len(BEFORE) - 93, len(BEFORE) - 3), (40, len(ids) - 93, len(ids) - 3)
    rig.populate(BEFORE, policy, old)
    turn = rig.turn(ids, policy, new)
    assert turn.receipt.outcome == "partial" and turn.receipt.chunks[2].shift is not None
    assert_continues_like_dense(rig, turn, ids)


def test_key_deviation_over_everything_equals_dense(rig: Rig) -> None:
    policy = replace(EVERYTHING, selector=KeyDeviation(layer=1, fraction=1.0))
    rig.populate(BEFORE, policy)
    assert_continues_like_dense(rig, rig.turn(LONGER, policy), LONGER)


def test_an_appended_turn_is_exact(rig: Rig) -> None:
    ids = np.concatenate([BEFORE, tokens(6, 25)])
    rig.populate(BEFORE, CacheSlide())
    turn = rig.turn(ids, CacheSlide())
    assert turn.receipt.exact and turn.receipt.active_tokens == 25
    assert_continues_like_dense(rig, turn, ids)


def test_generated_tokens_become_part_of_the_cached_context() -> None:
    rig = make_rig("llama")
    more = tokens(6, 5)
    with torch.inference_mode():
        turn = rig.turn(BEFORE, CacheSlide())
        continuation = rig.runtime.continuation(turn)
        continuation.append(more[:3].tolist())
        continuation.append(more[3:].tolist())
        rig.runtime.remember(turn, continuation.tokens)
    ids = np.concatenate([BEFORE, more, tokens(7, 4)])
    again = rig.turn(ids, CacheSlide())
    assert again.receipt.active_tokens == 4
    assert_continues_like_dense(rig, again, ids)


def test_reused_keys_are_stored_as_they_were() -> None:
    """Position-free keys of an uncorrected hit are the same bits turn after turn."""
    rig = make_rig("qwen3")
    policy = CacheSlide(selector=None, may_decline=False)
    rig.populate(BEFORE, policy)
    (first,) = rig.runtime.store.find(rig.turn(BEFORE, Recompute()).key)
    rig.populate(LONGER, policy)
    second = rig.runtime.store.find(rig.turn(BEFORE, Recompute()).key)[0]
    assert len(second) == len(LONGER)
    for layer in range(rig.runtime.stack.layers):
        old, new = (rig.runtime.store.load(context, layer)[0] for context in (first, second))
        assert torch.equal(new[:, 87 : 87 + 90], old[:, 70 : 70 + 90])


def test_a_context_that_was_reused_is_not_called_exact() -> None:
    rig = make_rig("llama")
    policy = CacheSlide(may_decline=False)
    rig.populate(BEFORE, policy)
    rig.populate(LONGER, policy)
    turn = rig.turn(LONGER, Prefix())
    assert turn.receipt.exact
    first_tokens_after_the_update = 16  # corrected on exact context: Boundary
    assert turn.receipt.reused_tokens == len(HEAD) + 47 + first_tokens_after_the_update


def test_prompt_cache_places_tokens_at_schema_positions() -> None:
    """Reference: transformers given the same position ids, with the chunk's keys computed alone."""
    rig = make_rig("llama")
    policy = PromptCache(slots={"chunk-1": 60})
    borders = (40, 70, 160)
    rig.populate(BEFORE, policy, borders)
    shorter = (40, 51, 141)
    turn = rig.turn(SHORTER, policy, shorter)
    positions = turn.plan.positions
    assert positions[40] == 40 and positions[51] == 100
    assert turn.receipt.reused_tokens >= 90


def test_the_key_cosine_probe_is_counted_in_the_compute_fraction() -> None:
    rig = make_rig("llama")
    plain = CacheSlide(selector=None, may_decline=False)
    asking = replace(plain, selector=Affinity(fraction=0.1, scores=(KeyCosine(layer=2),)))
    rig.populate(BEFORE, plain)
    without, asked = (rig.turn(LONGER, p).receipt for p in (plain, asking))
    corrected = asked.active_tokens - without.active_tokens
    update = 47 + 3
    layers = rig.runtime.stack.layers
    extra = (asked.compute_fraction - without.compute_fraction) * len(LONGER) * layers
    assert corrected > 0
    assert round(extra) == corrected * layers + update * 3


def test_a_nan_in_the_store_is_answered_by_dense_prefill() -> None:
    rig = make_rig("llama")
    policy = CacheSlide(may_decline=False)
    rig.populate(BEFORE, policy)
    (context,) = rig.runtime.store.find(rig.turn(BEFORE, Recompute()).key)
    layers = [rig.runtime.store.load(context, at) for at in range(rig.runtime.stack.layers)]
    layers[3][1][:, 100] = float("nan")
    assert rig.runtime.store.put(context, layers)
    turn = rig.turn(LONGER, policy)
    assert turn.receipt.outcome == "fallback" and "finite" in turn.receipt.reason
    assert turn.receipt.reused_tokens == 0 and turn.receipt.exact
    assert_continues_like_dense(rig, turn, LONGER)


@dataclass(frozen=True)
class Selects:
    """A selector that raises before the forward pass."""

    error: type[Exception]

    def select(self, view: Any) -> Any:
        raise self.error("out of luck")


@dataclass(frozen=True)
class Ranks:
    """A selector that raises in the middle of it."""

    error: type[Exception]
    layer: int = 1

    def budget(self, candidates: int) -> int:
        return candidates // 2

    def rank(self, view: Any, new_keys: torch.Tensor, cached_keys: torch.Tensor) -> Any:
        raise self.error("out of luck")


@pytest.mark.parametrize("error", [IndexError, RequestError, ModelError])
@pytest.mark.parametrize("selector", [Selects, Ranks])
def test_a_selector_that_raises_is_answered_by_dense_prefill(
    selector: type[Selects | Ranks], error: type[Exception]
) -> None:
    rig = make_rig("llama")
    policy = CacheSlide(selector=selector(error), may_decline=False)
    rig.populate(BEFORE, policy)
    turn = rig.turn(LONGER, policy)
    assert turn.receipt.outcome == "fallback" and "out of luck" in turn.receipt.reason
    assert_continues_like_dense(rig, turn, LONGER)


def test_weights_that_give_nan_are_a_model_error_not_a_fallback() -> None:
    rig = make_rig("llama")
    rig.reference.eval()
    with torch.no_grad():
        rig.runtime.stack._head.weight.fill_(float("nan"))
    with pytest.raises(ModelError, match="finite"):
        rig.turn(BEFORE, Recompute())


def test_peak_bytes_are_what_the_tensors_hold() -> None:
    rig = make_rig("llama")
    turn = rig.turn(BEFORE, Recompute(), room=8)
    captured = sum(keys.nbytes for layer in turn.cache.captured for _, keys in layer)
    arena = turn.cache.keys.untyped_storage().nbytes()
    assert captured == len(BEFORE) * 6 * 2 * 8 * 4
    assert turn.receipt.peak_kv_bytes == arena + captured


def test_a_gate_that_removes_promotes_the_next_ranked_from_their_residuals() -> None:
    rig = make_rig("llama")
    policy = CacheSlide(
        selector=KeyDeviation(layer=1, fraction=0.2),
        gate=CkSimGate(reading="converged", tau=0.5, every=2),
        may_decline=False,
    )
    rig.populate(BEFORE, policy)
    turn = rig.turn(LONGER, policy)
    assert turn.receipt.outcome == "partial"
    rows = turn.prefilled.rows_per_layer
    assert rows[2] == rows[4], "every row that converged was replaced by the next ranked"
    ungated = rig.turn(LONGER, replace(policy, gate=None))
    assert not np.array_equal(turn.prefilled.active, ungated.prefilled.active)
    computed, _ = turn.cache.captured[-1][-1]
    assert np.array_equal(turn.prefilled.active, computed), "a gate after the last layer is idle"


def test_generated_tokens_are_kept_beside_residuals_of_the_prompt() -> None:
    rig = make_rig("llama")
    policy = CacheSlide.paper()
    with torch.inference_mode():
        turn = rig.turn(BEFORE, policy)
        continuation = rig.runtime.continuation(turn)
        continuation.append([5, 6])
        rig.runtime.remember(turn, continuation.tokens)
    (context,) = rig.runtime.store.find(turn.key)
    assert len(context) == len(BEFORE) + 2
    again = rig.turn(np.concatenate([LONGER, [5, 6]]), policy)
    assert again.receipt.outcome == "partial"


@pytest.mark.usefixtures("learnt_prices")
def test_the_time_of_a_fallback_teaches_the_cost_model_nothing() -> None:
    rig = make_rig("llama")
    policy = CacheSlide(selector=Selects(IndexError), may_decline=False)
    rig.populate(BEFORE, policy)
    unit = Work(rows=1.0, pairs=1.0)
    before = rig.runtime.cost.predict(unit)
    assert rig.turn(LONGER, policy).receipt.outcome == "fallback"
    assert rig.runtime.cost.predict(unit) == before
    rig.turn(LONGER, Recompute())
    assert rig.runtime.cost.predict(unit) != before


def test_all_named_policies_answer_close_to_dense() -> None:
    """Not a quality bar (weights are random): the logits stay finite and of dense size."""
    rig = make_rig("llama")
    for name in ("prompt_cache", "cache_blend", "epic", "cacheslide", "cacheslide_paper"):
        policy = named(name)
        rig.populate(BEFORE, policy, (40, 70, 160))
        turn = rig.turn(LONGER, policy, (40, 87, 177))
        assert turn.receipt.outcome != "fallback", turn.receipt.reason
