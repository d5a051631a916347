"""A log of a model's own answers: which prompts, whose answers, and what a second run does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from cacheslide_agents.bench.asked import asked, trained_on
from cacheslide_agents.bench.datasets import HotpotQuestion, hotpot_questions
from cacheslide_agents.bench.workloads.base import Limits
from cacheslide_agents.cli.commands import app
from cacheslide_agents.prompt.chat import ChatEncoder
from cacheslide_agents.prompt.logged import read_trace
from torch_cacheslide.models import load_model

ROOMY = Limits(len, lambda _: 1, 10_000)


@pytest.fixture
def data(tmp_path: Path, support: Callable[[str], ModuleType]) -> Path:
    folder = tmp_path / "data"
    tiny: Any = support("tiny_data")
    tiny.write_tiny_data(folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, support: Callable[[str], ModuleType]) -> Path:
    tiny: Any = support("tiny_models")
    found: Path = tiny.write_model(tmp_path_factory.mktemp("base"), max_position_embeddings=4096)
    return found


def questions(data: Path) -> list[HotpotQuestion]:
    return hotpot_questions(data / "hotpotqa" / "dev.jsonl")


def record(model: Path, data: Path, out: Path, *more: str) -> Any:
    arguments = ["record", "--data", str(data), "--out", str(out), "-m", str(model), *more]
    return CliRunner().invoke(app, [*arguments, "--max-tokens", "3"])


def test_half_of_the_questions_are_held_out(data: Path) -> None:
    known = questions(data)
    learnt = {one.id for one in trained_on(known)}
    assert learnt == {each.id.split(":")[0] for each in asked(data, ROOMY, seed=0)}
    assert {one.id for one in known} - learnt == {one.id for one in known[::2]}


def test_the_shorter_prompt_keeps_every_gold_passage(data: Path) -> None:
    by_id = {one.id: one for one in questions(data)}
    for each in asked(data, ROOMY, seed=0):
        name, kind = each.id.split(":")
        question = by_id[name]
        text = "".join(message.content for message in each.prompt.messages)
        shown = [one for one in question.paragraphs if one.text in text]
        assert kind == "few" or len(shown) == len(question.paragraphs)
        assert {one.title for one in shown} >= set(question.supporting_titles)


def test_the_log_holds_the_models_own_greedy_answers(
    model: Path, data: Path, tmp_path: Path
) -> None:
    out = tmp_path / "log.jsonl"
    assert record(model, data, out).exit_code == 0
    loaded: Any = load_model(model)
    encoder, network = ChatEncoder(loaded.tokenizer), loaded.model
    found = list(read_trace(out))
    assert [one.id for one in found] == [each.id for each in asked(data, ROOMY, seed=0)]
    for one in found:
        ids = torch.tensor([one.encode(encoder).ids])
        wanted = network.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False
        )[0, ids.shape[1] :]
        assert list(one.output) == wanted.tolist()


def test_a_second_run_asks_only_what_is_missing(model: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "log.jsonl"
    assert record(model, data, out, "--limit", "1").exit_code == 0
    line = json.loads(out.read_text())
    kept = json.dumps({**line, "output_ids": [5], "output": "not asked again"})
    out.write_text(kept + "\n")
    assert record(model, data, out).exit_code == 0
    lines = out.read_text().splitlines()
    assert json.loads(lines[0]) == json.loads(kept)
    assert len(lines) == len(list(asked(data, ROOMY, seed=0)))


@pytest.mark.parametrize(
    "content, wrong",
    [
        (b'{"id": "q0", "model": "another"}', "is an answer of 'another'"),
        (b'{"text": "a book"}', "is no record of an answer"),
        (b"\xff\xfe\x00", "cannot be read"),
    ],
)
def test_a_file_that_holds_something_else_stays_as_it_is(
    content: bytes, wrong: str, model: Path, data: Path, tmp_path: Path
) -> None:
    out = tmp_path / "log.jsonl"
    out.write_bytes(content)
    refused = record(model, data, out)
    assert refused.exit_code == 2 and wrong in refused.stderr
    assert out.read_bytes() == content
