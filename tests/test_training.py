"""Conversion of a tiny Llama to CoPE: gradients, resumption, artifacts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner, Result

from cacheslide_agents.cli.commands import app
from cacheslide_agents.errors import (
    DataError,
    ModelError,
    ModelLoadError,
    ModelNotFoundError,
    RequestError,
)
from cacheslide_agents.training.artifact import Card, save_adapter
from cacheslide_agents.training.convert import CHECKPOINT, Conversion, Report
from cacheslide_agents.training.corpus import Corpus, read_texts
from cacheslide_agents.training.distil import distil
from cacheslide_agents.training.evaluate import evaluate
from cacheslide_agents.training.material import Material, even
from cacheslide_agents.training.recipe import Recipe
from cacheslide_agents.training.run import Job, train
from cacheslide_agents.training.student import Student
from cacheslide_agents.training.transfer import transfer
from torch_cacheslide.adapter import Adapter
from torch_cacheslide.binding import bind
from torch_cacheslide.cope import cope_from_llama, register_cope
from torch_cacheslide.locate import locate
from torch_cacheslide.models import load_model

SUPPORT = Path(__file__).parent / "support"
WINDOW = even(np.random.default_rng(0).integers(0, 256, 40))
IDS = WINDOW.ids


@pytest.fixture(scope="module")
def tiny(support: Callable[[str], ModuleType]) -> Any:
    return support("tiny_models")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny: Any) -> Path:
    found: Path = tiny.write_model(tmp_path_factory.mktemp("base"), initializer_range=0.4)
    return found


@pytest.fixture
def teacher(folder: Path) -> Any:
    return load_model(folder).model


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory, support: Callable[[str], ModuleType]) -> Path:
    found: Path = support("tiny_data").write_words(tmp_path_factory.mktemp("text"))
    return found


def test_a_new_cope_model_attends_by_content_alone_and_shares_the_rest(teacher: Any) -> None:
    student = cope_from_llama(teacher, npos=8)
    embeddings = [layer.self_attn.cope_embedding for layer in student.model.layers]
    assert [tuple(each.shape) for each in embeddings] == [(4, 8, 8)] * 2
    assert not any(each.any() for each in embeddings)
    shared = student.model.layers[0].mlp.up_proj.weight
    assert shared.data_ptr() == teacher.model.layers[0].mlp.up_proj.weight.data_ptr()
    own = student.model.layers[0].self_attn.q_proj.weight
    assert own.data_ptr() != teacher.model.layers[0].self_attn.q_proj.weight.data_ptr()


def test_transfer_loss_is_the_relative_error_of_each_layer_fed_with_the_teachers_input(
    teacher: Any,
) -> None:
    student = Student(teacher, Recipe(npos=8)).model
    hidden = teacher.model(IDS[None], output_hidden_states=True).hidden_states
    wanted = 0.0
    rope = teacher.model.rotary_emb(hidden[0], torch.arange(len(IDS))[None])
    still = (torch.ones(1, 1, 1), torch.zeros(1, 1, 1))
    for layer, other, states in zip(
        teacher.model.layers, student.model.layers, hidden[:2], strict=True
    ):
        normed = layer.input_layernorm(states)
        target = layer.self_attn(normed, position_embeddings=rope, attention_mask=None)[0]
        found = other.self_attn(normed, position_embeddings=still, attention_mask=None)[0]
        error = (found - target).square().sum() / target.square().sum()
        wanted += float(error.detach()) / 2
    assert transfer(teacher, student, WINDOW, share=1.0) == pytest.approx(wanted, rel=1e-5)


def test_transfer_gradients_equal_finite_differences(folder: Path) -> None:
    teacher: Any = load_model(folder, dtype="float64").model
    student = Student(teacher, Recipe(npos=8)).model
    weight = student.model.layers[1].self_attn.cope_embedding
    with torch.no_grad():
        weight += torch.randn(weight.shape, generator=torch.Generator().manual_seed(3)) / 10
    transfer(teacher, student, WINDOW, share=0.5)
    slope = float(weight.grad[2, 3, 1])
    losses = []
    for step in (1e-5, -2e-5):
        with torch.no_grad():
            weight[2, 3, 1] += step
        losses.append(transfer(teacher, student, WINDOW, share=0.5))
    # the reported loss is the mean over two layers; gradients are of their sum
    assert slope == pytest.approx(0.5 * 2 * (losses[0] - losses[1]) / 2e-5, rel=1e-4)


def test_distillation_is_the_gradient_of_the_mean_divergence(folder: Path) -> None:
    teacher: Any = load_model(folder, dtype="float64").model
    student = Student(teacher, Recipe(npos=8)).model
    weight = student.model.layers[0].self_attn.q_proj.weight
    loss = distil(teacher, student, WINDOW, share=0.25)
    split = weight.grad.clone()
    weight.grad = None
    p = torch.log_softmax(teacher(IDS[None]).logits[0], dim=-1)
    q = torch.log_softmax(student(IDS[None]).logits[0], dim=-1)
    whole = (p.exp() * (p - q)).sum(-1).mean()
    (whole * 0.25).backward()  # type: ignore[no-untyped-call]
    assert loss == pytest.approx(float(whole.detach()), rel=1e-5)
    torch.testing.assert_close(split, weight.grad, rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("rank", [None, 4])
def test_training_brings_the_converted_model_nearer_to_its_original(
    folder: Path, text: Path, tmp_path: Path, rank: int | None
) -> None:
    loaded = load_model(folder)
    corpus = Corpus(read_texts([text]), loaded.tokenizer, seed=0)
    recipe = Recipe(
        transfer_tokens=64 * 60, lengths=(64,), npos=8, adapter_rank=rank, learning_rate=5e-3
    )
    untrained = evaluate(
        loaded.model, Student(loaded.model, recipe).model, corpus.ids, [64], limit=4
    )
    conversion = Conversion(
        loaded.model, Material(corpus, recipe), recipe, tmp_path, base_digest="b"
    )
    reports = list(conversion)
    trained = evaluate(loaded.model, conversion.student.model, corpus.ids, [64], limit=4)
    assert len(reports) == 60 and conversion.tokens == 64 * 60
    assert reports[-1].loss < 0.8 * reports[0].loss
    assert trained[0].kl < untrained[0].kl


def test_evaluation_is_the_mean_over_every_predicted_token(teacher: Any) -> None:
    student = cope_from_llama(teacher, npos=8)
    ids = np.random.default_rng(2).integers(0, 256, 100)
    (found,) = evaluate(teacher, student, ids, [40], limit=9)
    nll, kl = [], []
    for start in (0, 40):
        window = torch.from_numpy(ids[start : start + 40])[None]
        with torch.no_grad():
            p, q = (m(window).logits[0, :-1].log_softmax(-1) for m in (teacher, student))
        nll.append(-q.gather(1, window[0, 1:, None]).mean())
        kl.append((p.exp() * (p - q)).sum(-1).mean())
    assert found.windows == 2
    assert found.nll == pytest.approx(float(sum(nll)) / 2, rel=1e-5)
    assert found.kl == pytest.approx(float(sum(kl)) / 2, rel=1e-3)


def test_twenty_kills_later_the_weights_are_those_of_an_undisturbed_run(
    folder: Path, text: Path, tmp_path: Path
) -> None:
    script = str(SUPPORT / "train_in_pieces.py")
    kills = {}
    for name, count in (("whole", 0), ("pieces", 20)):
        arguments = [str(folder), str(text), str(tmp_path / name), str(count), "7"]
        done = subprocess.run(
            [sys.executable, script, *arguments],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        kills[name] = int(done.stdout.split()[-1])
    assert kills["whole"] == 0 and kills["pieces"] == 20
    whole, pieces = (
        load_file(tmp_path / name / "model" / "model.safetensors") for name in ("whole", "pieces")
    )
    assert whole.keys() == pieces.keys()
    assert all(torch.equal(whole[name], pieces[name]) for name in whole)


def nothing(_: Report) -> None:
    pass


@pytest.fixture
def trained(folder: Path, text: Path, tmp_path: Path) -> Path:
    recipe = Recipe(transfer_tokens=320, lengths=(32,), npos=8, adapter_rank=2)
    train(Job(str(folder), [text], [text], tmp_path / "out", recipe, eval_lengths=(32,)), nothing)
    return tmp_path / "out"


def test_adapter_and_checkpoint_are_the_same_model(trained: Path, teacher: Any) -> None:
    register_cope()
    merged = AutoModelForCausalLM.from_pretrained(trained / "model")
    adapted = Adapter.read(trained / "adapter").applied(teacher)
    # the adapter is stored in bfloat16
    torch.testing.assert_close(
        adapted(IDS[None]).logits, merged(IDS[None]).logits, rtol=0, atol=2e-2
    )
    assert json.loads((trained / "adapter" / "cope.json").read_text())["tokens"] == 320
    assert not (trained / CHECKPOINT).exists()


@pytest.mark.parametrize("rank", [2, None])
def test_training_that_starts_from_an_adapter_begins_with_its_very_model(
    trained: Path, teacher: Any, rank: int | None
) -> None:
    start = Adapter.read(trained / "adapter")
    student = Student(teacher, Recipe(npos=8, adapter_rank=rank), start)
    assert student.trained
    found, wanted = student.merge().state_dict(), start.applied(teacher).state_dict()
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"adapter_rank": 3}, "has rank 2, the recipe 3; train with adapter_rank=2"),
        ({"npos": 9}, "has 8 positions, the recipe 9; train with npos=8"),
    ],
)
def test_a_start_of_another_shape_is_refused(
    trained: Path, teacher: Any, change: dict[str, Any], message: str
) -> None:
    recipe = Recipe(**{"npos": 8, "adapter_rank": 2, **change})
    with pytest.raises(RequestError, match=message):
        Student(teacher, recipe, Adapter.read(trained / "adapter"))


@pytest.mark.parametrize("rank", [2, None])
def test_a_start_from_another_base_is_refused(
    trained: Path, tiny: Any, tmp_path: Path, rank: int | None
) -> None:
    other = load_model(tiny.write_model(tmp_path / "other", seed=5, initializer_range=0.4)).model
    with pytest.raises(ModelLoadError, match="another model"):
        Student(other, Recipe(npos=8, adapter_rank=rank), Adapter.read(trained / "adapter"))


@pytest.mark.parametrize("rank", [2, None])
def test_a_start_with_a_damaged_tensor_is_refused(
    trained: Path, teacher: Any, rank: int | None
) -> None:
    tensors = load_file(trained / "adapter" / "cope.safetensors")
    tensors[next(name for name in tensors if "lora_B" in name)][0, 0] = float("nan")
    save_file(tensors, trained / "adapter" / "cope.safetensors")
    with pytest.raises(ModelLoadError, match="is not finite"):
        Student(teacher, Recipe(npos=8, adapter_rank=rank), Adapter.read(trained / "adapter"))


def test_distilling_an_adapter_brings_it_nearer_and_its_card_tells_both_parts(
    trained: Path, folder: Path, text: Path, tmp_path: Path, teacher: Any
) -> None:
    shape = Recipe(npos=8, adapter_rank=2, learning_rate=1e-2, distil_rate=1e-2)
    recipe = replace(shape, transfer_tokens=0, distil_tokens=32 * 40, lengths=(32,))
    start = trained / "adapter"
    job = Job(str(folder), [text], [text], tmp_path / "two", recipe, start, eval_lengths=(32,))
    reports: list[Report] = []
    (after,) = train(job, reports.append)
    ids = Corpus(read_texts([text]), load_model(folder).tokenizer, 0).ids
    (before,) = evaluate(teacher, Adapter.read(start).applied(teacher), ids, (32,), 8)
    assert after.kl < 0.9 * before.kl
    assert {report.phase for report in reports} == {"distil"}
    card = json.loads((tmp_path / "two" / "adapter" / "cope.json").read_text())
    assert (card["tokens"], card["before"]["tokens"]) == (1280, 320)
    assert card["before"]["recipe"]["transfer_tokens"] == 320


def test_an_adapter_refuses_another_base_and_asks_about_another_precision(
    trained: Path, folder: Path, tiny: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    adapter = Adapter.read(trained / "adapter")
    other = load_model(tiny.write_model(tmp_path / "other", seed=5, initializer_range=0.4)).model
    with pytest.raises(ModelLoadError, match="another model"):
        adapter.applied(other)
    rounded = load_model(folder, dtype="bfloat16").model
    with pytest.raises(ModelLoadError, match="another precision"):
        adapter.applied(rounded)
    assert adapter.applied(rounded, other_precision=True) is not None
    assert "another precision" in caplog.text


def test_an_adapter_folder_loads_like_a_model_and_is_merged_once(
    trained: Path, teacher: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    monkeypatch.setenv("CACHESLIDE_HOME", str(home))
    with pytest.raises(ModelNotFoundError, match=rf"base model of the adapter .*{folder.name}"):
        load_model(trained / "adapter")
    (home / "models").mkdir(parents=True)
    (home / "models" / folder.name).symlink_to(folder)
    loaded = load_model(trained / "adapter")
    wanted = Adapter.read(trained / "adapter").applied(teacher)
    assert torch.equal(loaded.model(IDS[None]).logits, wanted(IDS[None]).logits)
    assert load_model(trained / "adapter").path == loaded.path == locate(trained / "adapter")
    assert loaded.path.parent == home / "models"


def test_a_base_that_is_stored_in_another_precision_is_read_in_the_adapters(
    trained: Path, teacher: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = tmp_path / "home" / "models"
    monkeypatch.setenv("CACHESLIDE_HOME", str(tmp_path / "home"))
    rounded = load_model(folder, dtype="bfloat16")
    rounded.model.save_pretrained(models / folder.name)
    rounded.tokenizer.save_pretrained(models / folder.name)
    with pytest.raises(ModelLoadError, match="another precision"):
        load_model(trained / "adapter")  # float32 weights rounded to bfloat16 are others
    card = json.loads((trained / "adapter" / "cope.json").read_text())
    reread = load_model(models / folder.name, dtype="float32").model
    card["bound"] = {name: asdict(each) for name, each in bind(reread).items()}
    (trained / "adapter" / "cope.json").write_text(json.dumps(card))
    assert load_model(trained / "adapter").model.config.model_type == "cope_llama"


def test_a_base_that_cannot_be_read_and_an_adapter_of_itself_are_named(
    trained: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CACHESLIDE_HOME", str(tmp_path / "home"))
    (tmp_path / "home" / "models" / folder.name).mkdir(parents=True)
    with pytest.raises(ModelLoadError, match=r"base model of the adapter .* cannot be loaded"):
        load_model(trained / "adapter")
    itself = json.loads((trained / "adapter" / "cope.json").read_text()) | {"base": "adapter"}
    (trained / "adapter" / "cope.json").write_text(json.dumps(itself))
    with pytest.raises(ModelNotFoundError, match="names the adapter itself"):
        load_model(trained / "adapter")


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("cope.json", b'{"format": 2}', "is not the card of a conversion: format 2 is not 1"),
        ("cope.json", b"[]", "is not the card of a conversion"),
        ("cope.json", b"[" * 100_000, "is not the card of a conversion"),
        ("cope.safetensors", b"torn", "cannot be read"),
    ],
)
def test_a_damaged_adapter_is_named(trained: Path, file: str, content: bytes, message: str) -> None:
    (trained / "adapter" / file).write_bytes(content)
    with pytest.raises(ModelLoadError, match=message):
        Adapter.read(trained / "adapter")


@pytest.mark.parametrize("npos", [-1, 1, 10**30, 8.5, "8", None])
def test_positions_that_cannot_be_are_refused(trained: Path, npos: object) -> None:
    path = trained / "adapter" / "cope.json"
    card = json.loads(path.read_text())
    card["recipe"]["npos"] = npos
    path.write_text(json.dumps(card))
    with pytest.raises(ModelLoadError, match=r"npos .* is no whole number from 2 to"):
        Adapter.read(trained / "adapter")


QUERY, EMBEDDED = "model.layers.1.self_attn.q_proj", "model.layers.0.self_attn.cope_embedding"


@pytest.mark.parametrize(
    "spoil",
    [
        lambda tensors: tensors.clear(),
        lambda tensors: tensors.pop(EMBEDDED),
        lambda tensors: tensors.pop(f"{QUERY}.lora_A"),
        lambda tensors: tensors.pop(f"{QUERY}.lora_B"),
        lambda tensors: [tensors.pop(f"{QUERY}.lora_{each}") for each in "AB"],
        lambda tensors: tensors.update({"model.norm.weight": torch.ones(32)}),
        lambda tensors: tensors.update({f"{QUERY}.lora_C": torch.ones(2, 2)}),
        lambda tensors: tensors.update({EMBEDDED: torch.ones(8, 8)}),
        lambda tensors: tensors.update({EMBEDDED: torch.ones(1)}),
        lambda tensors: tensors.update({EMBEDDED: torch.full((4, 8, 8), torch.nan)}),
        lambda tensors: tensors.update({EMBEDDED: torch.ones(4, 8, 8, dtype=torch.int64)}),
        lambda tensors: tensors.update({f"{QUERY}.lora_B": torch.ones(1, 2)}),
        lambda tensors: tensors.update({f"{QUERY}.lora_A": torch.ones(2)}),
    ],
)
def test_an_adapter_that_is_not_whole_or_does_not_fit_is_refused(
    trained: Path, teacher: Any, spoil: Callable[[dict[str, torch.Tensor]], object]
) -> None:
    path = trained / "adapter" / "cope.safetensors"
    before = {name: value.clone() for name, value in teacher.state_dict().items()}
    tensors = load_file(path)
    spoil(tensors)
    save_file(tensors, path)
    with pytest.raises(ModelLoadError, match="does not fit its card or its base model"):
        Adapter.read(trained / "adapter").applied(teacher)
    assert all(torch.equal(value, before[name]) for name, value in teacher.state_dict().items())


def test_what_was_merged_is_made_again_when_the_card_changes(
    trained: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CACHESLIDE_HOME", str(tmp_path / "home"))
    path = trained / "adapter" / "cope.json"
    card = json.loads(path.read_text()) | {"base": str(folder)}
    path.write_text(json.dumps(card))
    first = locate(trained / "adapter")
    path.write_text(json.dumps(card | {"recipe": {**card["recipe"], "npos": 9}}))
    with pytest.raises(ModelLoadError, match="does not fit its card"):
        locate(trained / "adapter")
    path.write_text(json.dumps(card))
    assert locate(trained / "adapter") == first


def test_adapters_of_adapters_are_refused(trained: Path, tmp_path: Path) -> None:
    path = trained / "adapter" / "cope.json"
    card = json.loads(path.read_text()) | {"base": str(trained / "adapter")}
    path.write_text(json.dumps(card))
    with pytest.raises(ModelNotFoundError, match="which is an adapter, too"):
        locate(trained / "adapter")


def test_weights_that_are_not_finite_are_not_written(teacher: Any, tmp_path: Path) -> None:
    recipe = Recipe(npos=8, adapter_rank=2)
    student = Student(teacher, recipe)
    card = Card("base", "float32", recipe, tokens=0, seconds=0.0, threads=1, held_out=[], bound={})
    next(iter(student.trained.values())).data[0] = torch.nan
    with pytest.raises(ModelError, match="not finite"):
        save_adapter(student, card, tmp_path / "bad")
    assert not (tmp_path / "bad").exists()


def test_a_folder_that_holds_another_run_is_refused(
    folder: Path, text: Path, tmp_path: Path
) -> None:
    loaded = load_model(folder)
    corpus = Corpus(read_texts([text]), loaded.tokenizer, seed=0)
    recipe = Recipe(transfer_tokens=640, lengths=(32,), npos=8)
    started = iter(
        Conversion(
            loaded.model,
            Material(corpus, recipe),
            recipe,
            tmp_path,
            base_digest="b",
            checkpoint_every=1,
        )
    )
    next(started)
    changed = Recipe(transfer_tokens=640, lengths=(32,), npos=8, learning_rate=1e-3)
    with pytest.raises(DataError, match="another recipe"):
        next(
            iter(
                Conversion(
                    loaded.model, Material(corpus, changed), changed, tmp_path, base_digest="b"
                )
            )
        )
    (tmp_path / CHECKPOINT).write_bytes(b"torn")
    with pytest.raises(DataError, match="cannot be read"):
        next(
            iter(
                Conversion(
                    loaded.model, Material(corpus, recipe), recipe, tmp_path, base_digest="b"
                )
            )
        )


@pytest.mark.parametrize(
    "line", ["{", "[" * 100_000, "[]", '{"text": 3}', '{"text": ""}', '{"other": "x"}']
)
def test_a_bad_line_of_text_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "good"}\n' + line + "\n")
    with pytest.raises(DataError, match=r"bad\.jsonl:2"):
        read_texts([path])


@pytest.mark.parametrize(
    "change",
    [
        {"transfer_tokens": 0},
        {"distil_tokens": -1},
        {"lengths": ()},
        {"lengths": (4,)},
        {"npos": 1},
        {"seed": -1},
        {"request_share": 0.0},
        {"longest_request": 4},
        {"answer_weight": 1.0},
    ],
)
def test_a_recipe_out_of_range_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(change))):
        Recipe(**change)


def test_steps_cover_the_tokens_and_the_rate_rises_and_falls(folder: Path, text: Path) -> None:
    recipe = Recipe(transfer_tokens=1000, lengths=(100, 50), warmup=0.25, floor=0.1)
    corpus = Corpus(read_texts([text]), load_model(folder).tokenizer, seed=0)
    material = Material(corpus, recipe)
    assert material.steps("transfer") == 13  # six rounds of 150 and 100 more
    lengths = [len(material.windows("transfer", step)[0].ids) for step in range(13)]
    assert lengths == [100, 50] * 6 + [100]
    rates = [recipe.rate(step, 100) for step in range(100)]
    assert rates[0] == pytest.approx(1 / 26) and max(rates) == pytest.approx(1.0)
    assert rates[-1] == pytest.approx(0.1, abs=0.001)
    assert rates.index(max(rates)) == 25


def test_windows_depend_on_seed_and_number_alone(folder: Path, text: Path) -> None:
    tokenizer = load_model(folder).tokenizer
    texts = read_texts([text])
    first, again, other = (Corpus(texts, tokenizer, seed) for seed in (0, 0, 1))
    assert np.array_equal(first.window(7, 30), again.window(7, 30))
    assert not np.array_equal(first.window(7, 30), first.window(8, 30))
    assert not np.array_equal(first.window(7, 30), other.window(7, 30))
    with pytest.raises(DataError, match="a window needs"):
        first.window(0, 10**6)


def test_binding_names_every_attention_projection(teacher: Any) -> None:
    assert len(bind(teacher)) == 2 * 4


def test_the_command_line_trains_and_says_how_near_it_came(folder: Path, tmp_path: Path) -> None:
    def cli(*arguments: str) -> Result:
        return CliRunner().invoke(app, arguments)

    words = " ".join(["seven small boats left the harbour"] * 400)
    text = tmp_path / "long.jsonl"
    text.write_text(json.dumps({"text": words}) + "\n")
    arguments = ["train", "--text", str(text), "--valid", str(text), "-m", str(folder), "--json"]
    arguments += ["--tokens", "64", "--lengths", "16,32", "--npos", "8"]
    nowhere = cli(*arguments, "--out", str(tmp_path / "c"), "--start", str(tmp_path / "none"))
    assert nowhere.exit_code == 2 and "is not the card of a conversion" in nowhere.stderr
    refused = cli(*arguments, "--out", str(tmp_path / "a"), "--lengths", "16,x")
    assert refused.exit_code == 2 and "whole numbers" in refused.stderr
    done = cli(*arguments, "--out", str(tmp_path / "b"))
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)["held_out"]
    assert [each["length"] for each in found] == [256, 1024, 2048]
    assert json.loads((tmp_path / "b" / "model" / "cope.json").read_text())["tokens"] == 64
    again = cli(*arguments, "--out", str(tmp_path / "b"))
    assert again.exit_code == 2 and "exists already" in again.stderr
