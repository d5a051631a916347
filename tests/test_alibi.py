"""ALiBi: slopes and biases of MPT, and MPT models whose reused text has moved."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, MptConfig
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from cacheslide_agents.backend import GenerationRequest, Sampling
from cacheslide_agents.errors import UnsupportedModelError
from cacheslide_agents.policies import CacheSlide, Recompute
from cacheslide_agents.position.alibi import Alibi, mpt_slopes
from cacheslide_agents.selection import Everything
from torch_cacheslide import TorchBackend
from torch_cacheslide.load import Decoupling

WINDOW = 256
EVERYTHING = CacheSlide(selector=Everything(), may_decline=False)


@pytest.mark.parametrize("heads", [1, 2, 5, 6, 8, 12, 32, 40])
@pytest.mark.parametrize("bias_max", [8, 4])
def test_biases_are_those_of_mpt_up_to_a_constant_of_the_row(heads: int, bias_max: int) -> None:
    keys = torch.arange(30)
    theirs = build_mpt_alibi_tensor(heads, 30, bias_max)
    ours = Alibi(mpt_slopes(heads, bias_max)).bias(torch.tensor([29, 17]), keys)
    torch.testing.assert_close(ours[:, :1], theirs)
    shift = ours[:, 1] - theirs[:, 0]
    torch.testing.assert_close(shift, shift[:, :1].expand_as(shift))
    assert bool((ours[:, 1, 17] == 0).all())


def test_keys_are_left_as_they_are() -> None:
    alibi, keys = Alibi(mpt_slopes(4)), torch.randn(2, 5, 8)
    cos, sin = alibi.cos_sin(torch.arange(5))
    out = torch.empty_like(keys)
    assert alibi.rotate(keys, cos, sin, out=out) is out
    for same in (out, alibi.rotate(keys, cos, sin), alibi.unrotate(keys, cos, sin)):
        assert torch.equal(same, keys)


def write_mpt(folder: Path, tiny: Any, **changes: Any) -> Path:
    torch.manual_seed(3)
    attention = {"clip_qkv": 2.5, "softmax_scale": 0.3, **changes.pop("attn_config", {})}
    sizes = {"d_model": 48, "n_heads": 6, "n_layers": 3, "max_seq_len": WINDOW}
    config = MptConfig(
        vocab_size=tiny.VOCABULARY,
        attn_config=attention,
        initializer_range=0.3,
        eos_token_id=258,
        **{**sizes, **changes},
    )
    tiny.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tiny.byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["as published", "six heads, clipped, scaled"])
def folder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, support: Any
) -> Path:
    path: Path = tmp_path_factory.mktemp("tiny-mpt")
    published = {
        "n_heads": 4,
        "d_model": 32,
        "attn_config": {"clip_qkv": None, "softmax_scale": None},
    }
    changes = published if request.param == "as published" else {}
    return write_mpt(path, support("tiny_models"), **changes)


@pytest.fixture(scope="module")
def mpt(folder: Path) -> Iterator[TorchBackend]:
    backend = TorchBackend(str(folder), device="cpu", store_bytes=1 << 26)
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder).train(False)


def ids_of(seed: int, count: int) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(0, 250, count).tolist()
    return ids


def tokens_of(backend: TorchBackend, request: GenerationRequest, index: int = 0) -> list[int]:
    chunks = [chunk for chunk in backend.generate(request) if chunk.index == index]
    return [token for chunk in chunks for token in chunk.token_ids]


def dense_logprobs(reference: Any, ids: list[int], more: list[int]) -> Any:
    with torch.inference_mode():
        logits = reference(torch.tensor([ids + more])).logits[0, len(ids) - 1 : -1]
    return logits.log_softmax(-1).numpy()


@pytest.mark.parametrize("count", [1, 7, 150])
def test_cold_prompts_are_computed_as_transformers_does(
    mpt: TorchBackend, reference: Any, count: int
) -> None:
    ids, more = ids_of(1, count), ids_of(2, 9)
    request = GenerationRequest(ids, policy=Recompute(), sampling=Sampling(max_tokens=12))
    scores = mpt.score(request, more).logprobs
    np.testing.assert_allclose(scores, dense_logprobs(reference, ids, more), atol=2e-4)
    expected = reference.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, count),
        max_new_tokens=12,
        do_sample=False,
        pad_token_id=0,
    )
    assert tokens_of(mpt, request) == expected[0, count:].tolist()


@pytest.mark.parametrize("shift", [-6, 0, 11])
def test_moved_text_with_everything_corrected_equals_dense(
    mpt: TorchBackend, reference: Any, shift: int
) -> None:
    ids, more, task = ids_of(3, 120), ids_of(5, 6), f"shift {shift}"
    mpt.warm(GenerationRequest(ids, task=task, policy=EVERYTHING))
    moved = [*ids_of(4, 20 + shift), *ids[20:], *ids_of(6, 10)]
    request = GenerationRequest(moved, task=task, policy=EVERYTHING, retain=False)
    scores = mpt.score(request, more)
    assert scores.receipt.outcome in ("hit", "partial")
    expected = dense_logprobs(reference, moved, more)
    np.testing.assert_allclose(scores.logprobs, expected, atol=2e-4)


@pytest.mark.parametrize("decoupling", list(Decoupling))
def test_moved_text_is_biased_by_its_new_place(
    tmp_path: Path, support: Any, decoupling: str
) -> None:
    """In a model of one layer keys and values depend on the token alone: reuse is exact."""
    folder = write_mpt(tmp_path, support("tiny_models"), n_layers=1)
    backend = TorchBackend(str(folder), device="cpu", decoupling=decoupling, prefetch=1)
    ids, more, policy = ids_of(3, 120), ids_of(5, 6), CacheSlide(may_decline=False)
    backend.warm(GenerationRequest(ids, policy=policy))
    moved = [*ids_of(4, 31), *ids[20:]]
    scores = backend.score(GenerationRequest(moved, policy=policy, retain=False), more)
    backend.close()
    assert 10 < scores.receipt.reused_tokens < 100
    reference = AutoModelForCausalLM.from_pretrained(folder).train(False)
    expected = dense_logprobs(reference, moved, more)
    np.testing.assert_allclose(scores.logprobs, expected, atol=2e-4)


def test_an_answer_is_found_by_the_next_turn(mpt: TorchBackend, reference: Any) -> None:
    ids, more = ids_of(7, 60), ids_of(8, 5)
    sampling = Sampling(max_tokens=20, temperature=1.0, seed=0, n=3, ignore_eos=True)
    first = GenerationRequest(ids, task="turns", sampling=sampling, policy=EVERYTHING)
    answer = tokens_of(mpt, first)
    turn = [*ids, *answer[:-1], *ids_of(9, 12)]
    request = GenerationRequest(turn, task="turns", policy=EVERYTHING, retain=False)
    scores = mpt.score(request, more)
    assert scores.receipt.reused_tokens == len(ids) + 19
    np.testing.assert_allclose(scores.logprobs, dense_logprobs(reference, turn, more), atol=2e-4)


def test_several_answers_are_those_of_requests_of_their_own(mpt: TorchBackend) -> None:
    sampling = Sampling(max_tokens=10, temperature=1.0, seed=4, n=3, ignore_eos=True)
    request = GenerationRequest(ids_of(10, 50), sampling=sampling, policy=Recompute(), retain=False)
    for index in range(3):
        alone = replace(request, sampling=replace(sampling, n=1, seed=4 + index))
        assert tokens_of(mpt, request, index) == tokens_of(mpt, alone)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"attn_config": {"alibi": False}}, "alibi"),
        ({"attn_config": {"qk_ln": True}}, "qk_ln"),
        ({"attn_config": {"prefix_lm": True}}, "prefix_lm"),
        ({"attn_config": {"attn_type": "multiquery_attention"}}, "attn_type"),
        ({"logit_scale": 0.5}, "logit_scale"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_transformers_would_not_compute_is_refused_by_name(
    tmp_path: Path, support: Any, changes: dict[str, Any], name: str
) -> None:
    folder = write_mpt(tmp_path, support("tiny_models"))
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["attn_config"] |= changes.pop("attn_config", {})
    path.write_text(json.dumps(config | changes))
    with pytest.raises(UnsupportedModelError, match=name):
        TorchBackend(str(folder), device="cpu")
