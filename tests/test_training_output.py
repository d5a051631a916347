"""What a conversion says before it begins, and what it leaves where it cannot write or is cut."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from cacheslide_agents.cli.commands import app
from cacheslide_agents.errors import DataError, RequestError
from cacheslide_agents.training import checkpoint
from cacheslide_agents.training.artifact import Card, save_adapter, save_checkpoint
from cacheslide_agents.training.convert import CHECKPOINT, Report
from cacheslide_agents.training.corpus import read_texts
from cacheslide_agents.training.output import claimed
from cacheslide_agents.training.recipe import Recipe
from cacheslide_agents.training.run import Job, train
from cacheslide_agents.training.student import Student
from torch_cacheslide.adapter import MOST_POSITIONS, Adapter
from torch_cacheslide.models import LoadedModel, load_model

RECIPE = Recipe(transfer_tokens=64, lengths=(16,), npos=8, adapter_rank=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, support: Callable[[str], ModuleType]) -> Path:
    found: Path = support("tiny_models").write_model(tmp_path_factory.mktemp("base"))
    return found


@pytest.fixture
def loaded(folder: Path) -> LoadedModel:
    return load_model(folder)


@pytest.fixture
def full_after(support: Callable[[str], ModuleType]) -> Any:
    return support("full_disk").full_after


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.jsonl"
    path.write_text(json.dumps({"text": "seven small boats left the harbour " * 20}) + "\n")
    return path


@pytest.fixture
def job(folder: Path, text: Path, tmp_path: Path) -> Job:
    return Job(str(folder), [text], [text], tmp_path / "out", RECIPE, eval_lengths=(32,))


def card(recipe: Recipe = RECIPE) -> Card:
    return Card("base", "float32", recipe, tokens=0, seconds=0.0, threads=1, held_out=[], bound={})


def never(_: Report) -> None:
    raise AssertionError("a step was run")


def nothing(_: Report) -> None:
    pass


def replaced(job: Job, **fields: Any) -> Job:
    return Job(**{**vars(job), **fields})


def test_a_disk_that_is_full_names_the_checkpoint_and_leaves_the_last_one(
    loaded: LoadedModel, tmp_path: Path, full_after: Any
) -> None:
    trained = Student(loaded.model, RECIPE).trained
    optimizer = torch.optim.AdamW(trained.values())
    path, progress = tmp_path / CHECKPOINT, checkpoint.Progress("transfer", 1, 0.0, 0, "d")
    checkpoint.save(path, progress, trained, optimizer)
    before = path.read_bytes()
    with full_after(1000), pytest.raises(DataError, match=rf"{CHECKPOINT}.* cannot be written.*go"):
        checkpoint.save(path, progress, trained, optimizer)
    assert [each.name for each in tmp_path.iterdir()] == [CHECKPOINT]
    assert path.read_bytes() == before


@pytest.mark.parametrize("rank", [2, None])
def test_a_disk_that_is_full_leaves_no_half_of_a_result(
    loaded: LoadedModel, tmp_path: Path, full_after: Any, rank: int | None
) -> None:
    student = Student(loaded.model, Recipe(npos=8, adapter_rank=rank))

    def save() -> None:
        if rank is None:
            save_checkpoint(student.model, loaded.tokenizer, card(), tmp_path / "made")
        else:
            save_adapter(student, card(), tmp_path / "made")

    with (
        full_after(1000),
        pytest.raises(DataError, match=r"made.* cannot be written.*run it again"),
    ):
        save()
    assert list(tmp_path.iterdir()) == []
    save()
    assert [each.name for each in tmp_path.iterdir()] == ["made"]


def test_what_was_cut_while_the_result_was_written_goes_on(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(replaced(job, out=tmp_path / "whole"), nothing)
    write = Card.write

    def cut(self: Card, folder: Path) -> None:
        write(self, folder)
        if folder.name.startswith("model"):
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Card, "write", cut)
        with pytest.raises(KeyboardInterrupt):
            train(job, nothing)
    assert not (job.out / "model").exists()
    assert Adapter.read(job.out / "adapter").npos == 8
    train(job, never)
    whole, pieces = (
        load_file(each / "model" / "model.safetensors") for each in (tmp_path / "whole", job.out)
    )
    assert all(torch.equal(whole[name], pieces[name]) for name in whole)
    assert {each.name for each in job.out.iterdir()} == {"model", "adapter"}


def test_a_draft_that_a_kill_left_behind_is_swept_up(job: Job) -> None:
    draft = job.out / "model.part"
    draft.mkdir(parents=True)
    (draft / "left.over").write_text("")
    train(job, nothing)
    assert not draft.exists()
    assert not (job.out / "model" / "left.over").exists()


def test_two_runs_do_not_share_a_folder(job: Job) -> None:
    with claimed(job.out), pytest.raises(DataError, match=r"out is being written by another run"):
        train(job, never)
    assert list(job.out.iterdir()) == []
    train(job, nothing)


def test_a_result_that_appeared_meanwhile_is_not_replaced(job: Job) -> None:
    def other(_: Report) -> None:
        (job.out / "model").mkdir(exist_ok=True)
        (job.out / "model" / "theirs").write_text("")

    with pytest.raises(DataError, match="model exists already"):
        train(job, other)
    assert [each.name for each in (job.out / "model").iterdir()] == ["theirs"]
    assert not (job.out / "adapter").exists()


def test_an_adapter_whose_model_was_thrown_away_is_not_trained_over(job: Job) -> None:
    (job.out / "adapter").mkdir(parents=True)
    with pytest.raises(DataError, match="adapter exists already; choose another --out"):
        train(job, never)


def test_held_out_text_that_is_too_short_is_named_before_training(job: Job) -> None:
    with pytest.raises(DataError, match=r"held-out text .* needs 4096; give more of it"):
        train(replaced(job, eval_lengths=(32, 4096)), never)
    assert not job.out.exists()


def test_text_that_is_missing_or_too_short_is_named_before_training(
    job: Job, tmp_path: Path
) -> None:
    missing = replaced(job, valid_files=[tmp_path / "none.jsonl"])
    with pytest.raises(DataError, match=r"none\.jsonl: cannot be read"):
        train(missing, never)
    longer = Recipe(transfer_tokens=64, lengths=(16, 4096), npos=8)
    with pytest.raises(DataError, match=r"training text .* needs 4096; .* or shorter"):
        train(replaced(job, recipe=longer), never)


def test_a_folder_that_cannot_be_written_is_named_before_training(job: Job, text: Path) -> None:
    with pytest.raises(DataError, match=r"text\.jsonl/out cannot be written .*another --out"):
        train(replaced(job, out=text / "out"), never)


def test_positions_that_an_adapter_could_not_have_are_refused_by_the_recipe() -> None:
    assert Recipe(npos=MOST_POSITIONS).npos == MOST_POSITIONS
    with pytest.raises(RequestError, match=rf"npos={MOST_POSITIONS + 1}\) must be from 2 to 32768"):
        Recipe(npos=MOST_POSITIONS + 1)


def test_threads_that_cannot_be_are_refused_by_train(tmp_path: Path) -> None:
    threads, text = torch.get_num_threads(), str(tmp_path / "none.jsonl")
    paths = ["--text", text, "--valid", text, "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, ["train", *paths, "--threads", "100000"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "error: threads=100000 must be a whole number from 1 to 1024\n"
    assert torch.get_num_threads() == threads


def test_lines_end_where_the_file_says_so(tmp_path: Path) -> None:
    path, text = tmp_path / "text.jsonl", "a\u2028b\u2029c\x85d\x1ce"
    lines = [json.dumps({"text": each}, ensure_ascii=False) for each in (text, "next")]
    path.write_text("\ufeff" + "\r\n".join(lines), encoding="utf-8", newline="")
    assert read_texts([path]) == [text, "next"]


def test_text_that_no_tokenizer_takes_is_named_by_its_line(tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl"
    path.write_text('{"text": "good"}\n\n{"text": "a\\ud800"}\n')
    with pytest.raises(
        DataError, match=r"text\.jsonl:3: `text` is not Unicode text: .* 1; replace"
    ):
        read_texts([path])


def test_a_checkpoint_nested_without_end_is_named(tmp_path: Path) -> None:
    path = tmp_path / CHECKPOINT
    save_file({"a": torch.ones(1)}, path, metadata={"progress": "[" * 200_000})
    with pytest.raises(DataError, match="cannot be read"):
        checkpoint.load(path, "d")
