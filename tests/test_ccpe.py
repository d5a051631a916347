"""CCPE: canonical masses counted, kept in a file, and used at first prefill, against formulas."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from cacheslide_agents.backend import GenerationRequest, Receipt
from cacheslide_agents.bench.metrics import kl_divergence
from cacheslide_agents.chunks import EncodedPrompt, Role, Span
from cacheslide_agents.errors import DataError, ModelLoadError, RequestError
from cacheslide_agents.pages import ContextKey
from cacheslide_agents.policies import CacheSlide, Prefix, Recompute
from cacheslide_agents.policies.base import Policy
from cacheslide_agents.position import contextual
from cacheslide_agents.position.contextual import CanonicalMass, contextual_attention
from cacheslide_agents.position.profile import CanonicalEntry, Profile, chunks_behind_updates
from cacheslide_agents.selection import Boundary
from torch_cacheslide import TorchBackend
from torch_cacheslide.cope import register_cope

LAYERS, HEADS, NPOS = 2, 4, 16
RANDOM = np.random.default_rng(11)
HEAD, TAIL = (RANDOM.integers(3, 250, count).tolist() for count in (20, 40))
CUE = [5, 6, 7]


def prompt(update: list[int], task: str = "t") -> EncodedPrompt:
    parts = {"head": HEAD, "memory": update, "tail": TAIL, "cue": CUE}
    spans: list[Span] = []
    for name, ids in parts.items():
        start = spans[-1].stop if spans else 0
        role = Role.REUSE if name in ("head", "tail") else Role.RECOMPUTE
        spans.append(Span(name, role, start, start + len(ids), str(ids)))
    return EncodedPrompt(tuple(HEAD + update + TAIL + CUE), tuple(spans), "", task)


def tokens(count: int, seed: int = 0) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(3, 250, count).tolist()
    return found


PROMPTS = [prompt(tokens(count, count)) for count in (20, 24, 28)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, support: Callable[[str], ModuleType]) -> Path:
    sizes: dict[str, Any] = {"num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
    sizes |= {"max_position_embeddings": 256, "initializer_range": 0.3}
    folder: Path = support("tiny_models").write_cope_model(
        tmp_path_factory.mktemp("cope"), npos=NPOS, std=0.7, seed=4, **sizes
    )
    return folder


@pytest.fixture
def backend(folder: Path) -> Iterator[TorchBackend]:
    backend = TorchBackend(str(folder), device="cpu", dtype="float64", store_bytes=1 << 24)
    yield backend
    backend.close()


@pytest.fixture
def profile(backend: TorchBackend) -> Profile:
    return backend.calibrate(PROMPTS)


def first_prefill(
    backend: TorchBackend, given: EncodedPrompt, policy: Policy, continuation: list[int]
) -> tuple[Any, Receipt]:
    request = GenerationRequest(
        given.ids, given.spans, task=given.task, policy=policy, retain=False
    )
    scores = backend.score(request, continuation)
    return scores.logprobs, scores.receipt


def straight_line(
    folder: Path, given: EncodedPrompt, profile: Profile | None, tail: list[int]
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Log-probabilities [prompt + tail, vocabulary] of the whole model, row by row in float64.

    Besides, queries and keys of every layer: [heads, n, head_dim], [kv_heads, n, head_dim].
    """
    register_cope()
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    spans = {span.id: span for span in given.spans}
    memory, chunk = spans["memory"], spans["tail"]
    hidden = model.model.embed_tokens(torch.tensor([*given.ids, *tail]))
    seen = []
    for number, layer in enumerate(model.model.layers):
        attention, normed = layer.self_attn, layer.input_layernorm(hidden)
        q, k, v = (
            getattr(attention, f"{name}_proj")(normed).view(len(hidden), -1, 8).transpose(0, 1)
            for name in "qkv"
        )
        seen.append((q, k))
        rows = []
        for row in range(len(hidden)):
            heads = []
            for head in range(HEADS):
                scores = k[head // 2, : row + 1] @ q[head, row] / math.sqrt(8)
                gates = torch.sigmoid(scores)
                if profile is not None and chunk.start <= row < chunk.stop:
                    wanted = int(profile.entries[0].mass[number, head])
                    total = gates[memory.start : memory.stop].sum()
                    if wanted < NPOS - 1 or total < NPOS - 1:
                        gates[memory.start : memory.stop] *= wanted / total
                places = gates.flip(0).cumsum(0).flip(0).clamp(max=NPOS - 1)
                read = attention.cope_embedding[head] @ q[head, row]
                low = places.floor().long()
                high = (low + 1).clamp(max=NPOS - 1)
                logits = scores + read[low] + (places - low) * (read[high] - read[low])
                heads.append(logits.softmax(0) @ v[head // 2, : row + 1])
            rows.append(torch.cat(heads))
        hidden = hidden + attention.o_proj(torch.stack(rows))
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return model.lm_head(model.model.norm(hidden)).log_softmax(-1), seen


@torch.no_grad()
def test_the_histogram_is_a_direct_count_of_gate_sums(folder: Path, profile: Profile) -> None:
    counted: dict[tuple[int, int], Counter[int]] = {}
    for each in PROMPTS:
        _, projected = straight_line(folder, each, None, [])
        memory, chunk = each.spans[1], each.spans[2]
        for layer, (q, k) in enumerate(projected):
            for head in range(HEADS):
                for row in range(chunk.start, chunk.stop):
                    scores = k[head // 2, memory.start : memory.stop] @ q[head, row]
                    mass = float(torch.sigmoid(scores / math.sqrt(8)).sum())
                    bins = counted.setdefault((layer, head), Counter())
                    bins[min(math.floor(mass + 0.5), NPOS - 1)] += 1
    (entry,) = profile.entries
    assert (entry.chunk, entry.update) == ("tail", "memory")
    assert (entry.prompts, entry.rows) == (3, 3 * len(TAIL))
    for (layer, head), bins in counted.items():
        most = max(bins.values())
        wanted = min(number for number, count in bins.items() if count == most)
        assert int(entry.mass[layer, head]) == wanted
        assert float(entry.share[layer, head]) == pytest.approx(most / entry.rows)


@torch.no_grad()
def test_the_first_prefill_under_a_profile_is_what_the_formula_gives(
    folder: Path, backend: TorchBackend, profile: Profile
) -> None:
    backend.add_profile(profile)
    given, more = prompt(tokens(33, 99)), [9, 10]
    logprobs, receipt = first_prefill(backend, given, CacheSlide(), [*more, 11])
    wanted, _ = straight_line(folder, given, profile, more)
    np.testing.assert_allclose(logprobs, wanted[-3:].numpy(), atol=1e-5)
    assert (receipt.outcome, receipt.ccpe, receipt.exact) == ("cold", len(TAIL), False)


def test_its_distance_from_the_plain_dense_run_is_small_but_measured(
    folder: Path, backend: TorchBackend, profile: Profile
) -> None:
    backend.add_profile(profile)
    given = prompt(tokens(33, 99))
    dense, plain = first_prefill(backend, given, Recompute(), [9])
    cold, _ = first_prefill(backend, given, CacheSlide(), [9])
    off, receipt = first_prefill(backend, given, CacheSlide(ccpe=False), [9])
    np.testing.assert_array_equal(off, dense)
    assert (plain.ccpe, receipt.ccpe, receipt.exact) == (0, 0, True)
    assert 1e-6 < kl_divergence(dense, cold) < 0.5
    # Of another policy than ours, or of a task nobody calibrated, the first prefill is plain.
    for task, policy in (("t", Prefix()), ("other", CacheSlide())):
        other, receipt = first_prefill(backend, prompt(tokens(33, 99), task), policy, [9])
        np.testing.assert_array_equal(other, dense)
        assert (receipt.ccpe, receipt.exact) == (0, True)


def test_a_prompt_that_is_typical_already_hardly_changes(
    backend: TorchBackend, profile: Profile
) -> None:
    """The masses of a profile are near those of the prompts it was learnt from."""
    backend.add_profile(profile)
    wild = Profile(
        "wild", profile.model, NPOS, (_entry("tail", "memory", torch.arange(HEADS) % 2 * 14),)
    )
    backend.add_profile(wild)
    given = PROMPTS[1]
    dense, _ = first_prefill(backend, given, Recompute(), [9])
    near, _ = first_prefill(backend, given, CacheSlide(), [9])
    far, _ = first_prefill(backend, prompt(tokens(24, 24), "wild"), CacheSlide(), [9])
    assert kl_divergence(dense, near) < 0.7 * kl_divergence(dense, far)


def test_reuse_goes_on_from_canonical_chunks_and_is_never_declined_for_them(
    backend: TorchBackend, profile: Profile
) -> None:
    backend.add_profile(profile)
    old, new = prompt(tokens(20, 1)), prompt(tokens(30, 2))
    policy = CacheSlide(selector=Boundary(4))
    backend.warm(GenerationRequest(old.ids, old.spans, task="t", policy=policy))
    _, receipt = first_prefill(backend, new, policy, [9])
    assert receipt.outcome == "hit"
    assert receipt.ccpe == 0  # the update and the correction rows stand at current positions
    assert receipt.reused_tokens > len(TAIL) - 16
    everything = CacheSlide(selector=Boundary(10**6), may_decline=False)
    whole, _ = first_prefill(backend, new, everything, [9])
    dense, _ = first_prefill(backend, new, Recompute(), [9])
    np.testing.assert_allclose(whole, dense, atol=1e-5)


def test_a_chunk_that_is_new_among_reused_ones_is_first_computed_canonically(
    folder: Path, backend: TorchBackend, profile: Profile
) -> None:
    """Rows few and far between attend by their own masses, as the whole prompt's do."""
    backend.add_profile(profile)
    given = prompt(tokens(33, 99))
    head = EncodedPrompt(given.ids[:30], (*given.spans[:1], _cut(given.spans[1], 30)), "", "t")
    backend.warm(GenerationRequest(head.ids, head.spans, task="t", policy=CacheSlide()))
    policy = CacheSlide(selector=None, may_decline=False)
    logprobs, receipt = first_prefill(backend, given, policy, [9, 10])
    assert (receipt.outcome, receipt.ccpe) == ("partial", len(TAIL))
    with torch.no_grad():
        wanted, _ = straight_line(folder, given, profile, [9])
    np.testing.assert_allclose(logprobs, wanted[-2:].numpy(), atol=1e-5)


def test_the_guard_tries_again_what_would_be_served(
    folder: Path, backend: TorchBackend, profile: Profile
) -> None:
    """Memory that moved is reused, and the tail behind it is computed for the first time."""
    guarded = TorchBackend(str(folder), device="cpu", dtype="float64", guard_every=1)
    policy, memory = CacheSlide(selector=None, may_decline=False), tokens(33, 99)
    old, given = prompt(memory), prompt([8, 9, *memory])
    cut = len(HEAD) + len(memory)
    for each in (backend, guarded):
        each.add_profile(profile)
        each.warm(GenerationRequest(old.ids[:cut], old.spans[:2], task="t", policy=policy))
    guard = guarded._runtime.guard
    assert guard is not None
    guard.record(ContextKey(guarded.fingerprint, "default", "t"), 9.0, now=0.0)
    dense, declined = first_prefill(guarded, given, policy, [9])
    served, receipt = first_prefill(backend, given, policy, [9])
    assert (declined.reason, receipt.ccpe) == ("guard", len(TAIL))
    assert guarded.settle(60)
    assert guarded.metrics()["guard_kl"] == pytest.approx(kl_divergence(dense, served), rel=1e-3)
    guarded.close()


@settings(max_examples=40)
@given(
    length=st.integers(30, 90),
    start=st.integers(0, 10),
    width=st.integers(1, 18),
    mass=st.floats(0, NPOS - 1),
    sharp=st.floats(0.1, 6),
)
def test_positions_stay_non_negative_and_monotone(
    length: int, start: int, width: int, mass: float, sharp: float
) -> None:
    stop, row = start + width, length - 1
    generator = torch.Generator().manual_seed(length)
    query, key = (sharp * torch.randn(2, length, 4, generator=generator)).double()
    query[:, 0] = 1.0
    canonical = CanonicalMass(start, stop, stop, length, torch.tensor([mass], dtype=torch.float64))
    places = _positions(query[row], key, canonical)
    assert bool((places > -1e-6).all())
    assert bool((places[:-1] - places[1:] > -1e-6).all())  # what lies further back is further away
    assert bool((places < NPOS - 1 + 1e-6).all())
    if float(places[start]) < NPOS - 1 - 1e-6:  # nothing is cut off: the update counts its mass
        assert float(places[start] - places[stop]) == pytest.approx(mass, abs=1e-6)


def _positions(query: Tensor, key: Tensor, mass: CanonicalMass) -> Tensor:
    """[keys]: where one row's attention puts them, read off at an embedding that grows evenly.

    With `query` [0] = 1 the weight of a key is its score plus 0.1 for every position, up to a
    constant that the row's own key tells: it stands at its gate.
    """
    embedding = torch.zeros(1, NPOS, 4, dtype=torch.float64)
    embedding[0, :, 0] = 0.1 * torch.arange(NPOS)
    row, everything = torch.tensor([len(key) - 1]), torch.eye(len(key), dtype=torch.float64)
    weights = contextual_attention(
        query[None, None], key[None], everything[None], embedding, row, scale=0.5, masses=(mass,)
    )
    scores = key @ query * 0.5
    read = 10 * (weights[0, 0].log() - scores)
    return read - read[-1] + torch.sigmoid(scores[-1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_gates_that_are_all_shut_count_nothing_in_any_precision(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 30, 4, generator=generator).to(dtype) for _ in range(3))
    query[..., 0], key[:, 3:9, 0] = 1.0, -2000.0
    rows = torch.arange(20, 30)
    mass = CanonicalMass(3, 9, 20, 30, torch.tensor([float(NPOS - 1)]))
    embedding = torch.randn(1, NPOS, 4, generator=generator).to(dtype)
    with_mass, without = (
        contextual_attention(query[:, rows], key, value, embedding, rows, scale=0.5, masses=masses)
        for masses in ((mass,), ())
    )
    assert torch.equal(with_mass, without)


def random_attention(seed: int, heads: int, keys: int) -> Callable[..., Tensor]:
    """CoPE over random float64 numbers, by rows and canonical masses."""
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (
        torch.randn(heads, keys, 8, generator=generator, dtype=torch.float64) for _ in range(3)
    )
    embedding = torch.randn(heads, NPOS, 8, generator=generator, dtype=torch.float64)

    def attended(rows: Tensor, *masses: CanonicalMass) -> Tensor:
        return contextual_attention(
            query[:, rows], key, value, embedding, rows, scale=8**-0.5, masses=masses
        )

    return attended


def test_a_mass_at_the_last_position_leaves_rows_that_count_more_as_they_are() -> None:
    attended, rows = random_attention(seed=0, heads=1, keys=80), torch.arange(60, 80)
    full = torch.tensor([NPOS - 1.0], dtype=torch.float64)
    many, few = CanonicalMass(0, 60, 60, 80, full), CanonicalMass(50, 58, 60, 80, full)
    torch.testing.assert_close(attended(rows, many), attended(rows))
    assert not torch.allclose(attended(rows, few), attended(rows))


def test_the_band_of_a_long_prompt_holds_whole_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    attended, rows = random_attention(seed=1, heads=2, keys=900), torch.arange(640, 900)
    mass = CanonicalMass(100, 620, 630, 800, torch.tensor([3.0, 9.0], dtype=torch.float64))
    found = attended(rows, mass)
    monkeypatch.setattr(contextual, "FIRST_BAND", 900)
    torch.testing.assert_close(attended(rows, mass), found)


def test_a_profile_comes_back_from_its_file(tmp_path: Path, profile: Profile) -> None:
    path = profile.save(tmp_path)
    again = Profile.read(path)
    assert path.name == "t.ccpe.safetensors"
    assert (again.task, again.model, again.npos) == (profile.task, profile.model, profile.npos)
    (old,), (new,) = profile.entries, again.entries
    assert (new.chunk, new.update, new.prompts, new.rows) == ("tail", "memory", 3, 120)
    assert torch.equal(old.mass, new.mass)
    assert torch.equal(old.share, new.share)
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_a_backend_reads_profiles_from_files_and_folders(
    tmp_path: Path, folder: Path, profile: Profile
) -> None:
    path = profile.save(tmp_path)
    for paths in (tmp_path, [str(path)]):
        backend = TorchBackend(str(folder), device="cpu", profiles=paths)  # float32: another dtype
        _, receipt = first_prefill(backend, PROMPTS[0], CacheSlide(), [9])
        backend.close()
        assert receipt.ccpe == len(TAIL)
        assert Receipt.from_dict(receipt.to_dict()) == receipt


def test_what_a_killed_save_left_behind_is_no_profile(
    tmp_path: Path, folder: Path, profile: Profile
) -> None:
    path = profile.save(tmp_path)
    path.with_name(f".{path.name}.tmp").write_bytes(b"torn")
    TorchBackend(str(folder), device="cpu", profiles=tmp_path).close()


def test_a_profile_of_another_model_is_refused(
    tmp_path: Path, folder: Path, profile: Profile, support: Callable[[str], ModuleType]
) -> None:
    path = profile.save(tmp_path)
    other = tmp_path / "other"
    register_cope()
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight *= 1.5
    model.save_pretrained(other)
    tiny = support("tiny_models")
    tiny.byte_tokenizer().save_pretrained(other)
    with pytest.raises(ModelLoadError, match="'t' was calibrated on another model"):
        TorchBackend(str(other), device="cpu", profiles=path)
    rope = tiny.write_model(tmp_path / "rope")
    with pytest.raises(RequestError, match="not; convert it with `cacheslide train`"):
        TorchBackend(str(rope), device="cpu", profiles=path)


def test_what_is_no_profile_is_refused_by_name(
    tmp_path: Path, folder: Path, profile: Profile
) -> None:
    missing, torn, foreign = (tmp_path / name for name in ("no.file", "torn", "foreign"))
    torn.write_bytes(profile.save(tmp_path).read_bytes()[:100])
    save_file({"x": torch.zeros(2)}, foreign)
    for path in (missing, torn, foreign):
        with pytest.raises(DataError, match=f"{path.name} is no CCPE profile"):
            Profile.read(path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds no CCPE profile"):
        TorchBackend(str(folder), device="cpu", profiles=tmp_path / "empty")
    path = profile.save(tmp_path)
    with pytest.raises(DataError, match="another profile of task 't'"):
        TorchBackend(str(folder), device="cpu", profiles=[path, path])


def test_masses_beyond_the_positions_are_refused(tmp_path: Path, profile: Profile) -> None:
    from safetensors import safe_open

    path = profile.save(tmp_path)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    tensors["0.mass"][0, 0] = NPOS
    save_file(tensors, path, metadata=metadata)
    with pytest.raises(DataError, match="masses must be 0 to 15"):
        Profile.read(path)


def test_prompts_that_teach_nothing_are_an_error(backend: TorchBackend) -> None:
    with pytest.raises(DataError, match="has a reuse chunk behind an update"):
        backend.calibrate([prompt([])])
    with pytest.raises(DataError, match="'t' and 'u' cannot share"):
        backend.calibrate([PROMPTS[0], prompt(tokens(5), "u")])


def test_pairs_are_reuse_chunks_behind_updates_with_text() -> None:
    spans = [
        Span(name, Role(role), start, stop, name)
        for name, role, start, stop in (
            ("a", "reuse", 0, 4),
            ("u", "recompute", 4, 8),
            ("none", "recompute", 8, 8),
            ("b", "reuse", 8, 9),
            ("v", "recompute", 9, 12),
            ("c", "reuse", 12, 20),
            ("empty", "reuse", 20, 20),
        )
    ]
    pairs = [(chunk.id, update.id) for chunk, update in chunks_behind_updates(spans)]
    assert pairs == [("b", "u"), ("c", "u"), ("c", "v")]


def _entry(chunk: str, update: str, masses: Tensor) -> CanonicalEntry:
    mass = masses.to(torch.int16).expand(LAYERS, HEADS).contiguous()
    return CanonicalEntry(chunk, update, 1, 1, mass, torch.ones(LAYERS, HEADS))


def _cut(span: Span, stop: int) -> Span:
    return Span(span.id, span.role, span.start, stop, "cut")
