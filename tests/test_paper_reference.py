"""`CacheSlide.paper()` against Algorithm 2 written down straight, in float64, from the weights.

The reference shares no code with the library: RoPE, attention, selection, fusion and gate are spelt
out below on plain tensors. The prompt is built so that its alignment is known: a head, an update,
a moved tail, a new ending.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from cacheslide_agents.backend import GenerationRequest
from cacheslide_agents.pages.store import MemoryStore
from cacheslide_agents.policies import CacheSlide
from cacheslide_agents.policies.cost import CostModel
from cacheslide_agents.position.rotary import Rotary
from torch_cacheslide.attention import ATTENTION_NAME, register_attention
from torch_cacheslide.runtime import Runtime
from torch_cacheslide.stack import DecoderStack

LAYERS, HEADS, KV_HEADS, HEAD_DIM, HIDDEN, VOCABULARY = 10, 6, 2, 8, 48, 199
FRACTION, EVERY = 0.26, 4
CONFIG = LlamaConfig(
    vocab_size=VOCABULARY,
    hidden_size=HIDDEN,
    intermediate_size=80,
    num_hidden_layers=LAYERS,
    num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS,
    max_position_embeddings=512,
    initializer_range=0.3,
)


def tokens(seed: int, count: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng(seed).integers(3, VOCABULARY, count)


HEAD, OLD, NEW, TAIL = tokens(1, 30), tokens(2, 20), tokens(3, 33), tokens(4, 70)
BEFORE = np.concatenate([HEAD, OLD, TAIL, tokens(5, 4)])
AFTER = np.concatenate([HEAD, NEW, TAIL, tokens(6, 4)])
HITS = np.arange(len(HEAD) + len(NEW), len(HEAD) + len(NEW) + len(TAIL))
SHIFT = len(NEW) - len(OLD)
ACTIVE = np.setdiff1d(np.arange(len(HEAD), len(AFTER)), HITS)


@dataclass
class Weights:
    state: dict[str, Tensor]

    def __call__(self, layer: int, name: str) -> Tensor:
        return self.state[f"model.layers.{layer}.{name}.weight"]


def norm(x: Tensor, weight: Tensor) -> Tensor:
    normed: Tensor = weight * x / (x.pow(2).mean(-1, keepdim=True) + CONFIG.rms_norm_eps).sqrt()
    return normed


def rope(x: Tensor, positions: npt.NDArray[np.int64]) -> Tensor:
    """[rows, heads, HEAD_DIM] turned pair by pair, dimension i with i + HEAD_DIM / 2."""
    half = HEAD_DIM // 2
    exponents = torch.arange(half, dtype=torch.float32) * 2 / HEAD_DIM
    theta = (1.0 / 10000.0**exponents).double()
    angle = torch.from_numpy(positions).double()[:, None] * theta
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def split(x: Tensor, heads: int) -> Tensor:
    return x.view(len(x), heads, HEAD_DIM)


def attention(query: Tensor, keys: Tensor, values: Tensor, rows: npt.NDArray[np.int64]) -> Tensor:
    """One row and one head at a time; keys and values [n, KV_HEADS, HEAD_DIM]."""
    turned_query = rope(query, rows)
    turned_keys = rope(keys, np.arange(len(keys)))
    output = torch.zeros_like(query)
    for i, row in enumerate(rows):
        for head in range(HEADS):
            group = head * KV_HEADS // HEADS
            scores = turned_keys[: row + 1, group] @ turned_query[i, head] / math.sqrt(HEAD_DIM)
            output[i, head] = scores.softmax(0) @ values[: row + 1, group]
    return output.reshape(len(rows), -1)


def finish_layer(w: Weights, layer: int, hidden: Tensor, attended: Tensor) -> Tensor:
    hidden = hidden + attended @ w(layer, "self_attn.o_proj").T
    x = norm(hidden, w(layer, "post_attention_layernorm"))
    gate = torch.nn.functional.silu(x @ w(layer, "mlp.gate_proj").T)
    return hidden + (gate * (x @ w(layer, "mlp.up_proj").T)) @ w(layer, "mlp.down_proj").T


def project(w: Weights, layer: int, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x = norm(hidden, w(layer, "input_layernorm"))
    query = split(x @ w(layer, "self_attn.q_proj").T, HEADS)
    keys = split(x @ w(layer, "self_attn.k_proj").T, KV_HEADS)
    return query, keys, split(x @ w(layer, "self_attn.v_proj").T, KV_HEADS)


@dataclass
class Dense:
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)


def dense(w: Weights, ids: npt.NDArray[np.int64]) -> Dense:
    run, rows = Dense(), np.arange(len(ids))
    hidden = w.state["model.embed_tokens.weight"][torch.from_numpy(ids)]
    for layer in range(LAYERS):
        query, keys, values = project(w, layer, hidden)
        hidden = finish_layer(w, layer, hidden, attention(query, keys, values, rows))
        run.keys.append(keys)
        run.values.append(values)
        run.states.append(hidden)
    return run


def ratio(new: Tensor, cached: Tensor) -> Tensor:
    return (new - cached).pow(2).sum((1, 2)) / cached.pow(2).sum((1, 2))


@dataclass
class Algorithm2:
    """The corrected set after every layer, and the logits of the last row."""

    sets: list[list[int]] = field(default_factory=list)
    logits: Tensor = field(default_factory=lambda: torch.empty(0))
    keys: list[Tensor] = field(default_factory=list)


def algorithm_2(w: Weights, cached: Dense, tau: float, converged: bool) -> Algorithm2:
    run = Algorithm2()
    n, head = len(AFTER), len(HEAD)
    rows = np.arange(head, n)
    embedding = w.state["model.embed_tokens.weight"]
    hidden = {int(i): embedding[AFTER[i]] for i in rows}
    alpha: dict[int, Tensor] = {}
    chosen: list[int] = []
    reserve: list[int] = []
    for layer in range(LAYERS):
        all_keys = torch.zeros(n, KV_HEADS, HEAD_DIM, dtype=torch.float64)
        all_values = torch.zeros_like(all_keys)
        all_keys[:head], all_values[:head] = cached.keys[layer][:head], cached.values[layer][:head]
        all_keys[HITS] = cached.keys[layer][HITS - SHIFT]
        all_values[HITS] = cached.values[layer][HITS - SHIFT]
        stacked = torch.stack([hidden[int(i)] for i in rows])
        query, new_keys, new_values = project(w, layer, stacked)
        fresh = {int(i): (new_keys[j], new_values[j]) for j, i in enumerate(rows)}
        for i, (key, value) in fresh.items():
            a = alpha[i] if i in chosen else torch.tensor(1.0, dtype=torch.float64)
            old_key, old_value = all_keys[i].clone(), all_values[i].clone()
            all_keys[i] = a * key + (1 - a) * old_key
            all_values[i] = a * value + (1 - a) * old_value
            if i in chosen:
                alpha[i] = ratio(key[None], old_key[None])[0]
        out = finish_layer(w, layer, stacked, attention(query, all_keys, all_values, rows))
        hidden = {int(i): out[j] for j, i in enumerate(rows)}
        run.keys.append(all_keys)
        if layer == 1:
            new = torch.stack([fresh[int(i)][0] for i in HITS])
            old = cached.keys[layer][HITS - SHIFT]
            error = (new - old).pow(2).sum((1, 2))
            eligible = [j for j in range(len(HITS)) if error[j] > 1e-6 * old[j].pow(2).sum()]
            ranked = sorted(eligible, key=lambda j: (-float(error[j]), j))
            budget = math.ceil(FRACTION * len(HITS))
            chosen = sorted(int(HITS[j]) for j in ranked[:budget])
            reserve = [int(HITS[j]) for j in ranked[budget:]]
            for j in ranked:
                alpha[int(HITS[j])] = ratio(new[j : j + 1], old[j : j + 1])[0]
        elif layer > 1 and (layer + 1) % EVERY == 0:
            leaving = []
            for i in chosen:
                old = cached.keys[layer][i - SHIFT]
                similarity = torch.nn.functional.cosine_similarity(fresh[i][0], old, dim=-1).mean()
                if (1 - similarity if converged else similarity) < tau:
                    leaving.append(i)
            arriving, reserve = reserve[: len(leaving)], reserve[len(leaving) :]
            for i in arriving:
                hidden[i] = cached.states[layer][i - SHIFT]
            chosen = sorted(set(chosen) - set(leaving) | set(arriving))
        if layer >= 1:
            rows = np.array(sorted({*ACTIVE.tolist(), *chosen}))
        run.sets.append(chosen)
    last = norm(hidden[n - 1], w.state["model.norm.weight"])
    run.logits = w.state["lm_head.weight"] @ last
    return run


def in_float64(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """transformers' RMSNorm rounds to float32 inside; torch's own does not."""
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, LlamaRMSNorm):
                wide = nn.RMSNorm(HIDDEN, eps=CONFIG.rms_norm_eps)
                wide.load_state_dict(child.state_dict())
                setattr(parent, name, wide)
    return cast(LlamaForCausalLM, model.double().train(False))


@pytest.mark.parametrize(
    ("gate", "tau", "moves"),
    [("literal", 0.12, True), ("literal", -1.0, False), ("converged", 0.5, True)],
)
def test_the_paper_policy_equals_algorithm_2_written_straight(
    gate: Literal["literal", "converged"], tau: float, moves: bool
) -> None:
    register_attention()
    torch.manual_seed(3)
    factory: Any = LlamaForCausalLM
    model = in_float64(factory._from_config(CONFIG, attn_implementation=ATTENTION_NAME))
    weights = Weights({name: tensor.detach() for name, tensor in model.state_dict().items()})
    runtime = Runtime(
        DecoderStack(model),
        Rotary.from_config(CONFIG),
        MemoryStore(1 << 28),
        CostModel.from_config(CONFIG),
        "reference",
    )
    policy = CacheSlide.paper(gate=gate, tau=tau)
    with torch.inference_mode():
        before = runtime.prefill(GenerationRequest(BEFORE.tolist()), policy, 0)
        runtime.remember(before, [])
        turn = runtime.prefill(GenerationRequest(AFTER.tolist()), policy, 0)
        expected = algorithm_2(weights, dense(weights, BEFORE), tau, gate == "converged")
    assert turn.receipt.outcome == "partial", turn.receipt.reason
    corrected = np.setdiff1d(turn.prefilled.active, ACTIVE).tolist()
    assert corrected == expected.sets[-2], "the last gate has no layer after it"
    changes = {tuple(each) for each in expected.sets[2:]}
    assert (len(changes) > 1) == moves, "tau is chosen so that the gate moves tokens, or does not"
    got = turn.prefilled.logits[0]
    for layer, keys in enumerate(expected.keys):
        turned = rope(keys, np.arange(len(keys)))
        written = turn.cache.keys[layer].transpose(0, 1)[: len(keys)]
        assert (written - turned).abs().max() / turned.abs().max() < 1e-6
    error = (got - expected.logits).abs().max() / expected.logits.abs().max()
    assert error < 1e-6
