"""Training on an agent's requests: which tokens, in which order, with which weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from cacheslide_agents.cli.commands import app
from cacheslide_agents.errors import DataError
from cacheslide_agents.training.corpus import Corpus, read_texts
from cacheslide_agents.training.distil import distil
from cacheslide_agents.training.material import Material, Window
from cacheslide_agents.training.recipe import PHASES, Recipe
from cacheslide_agents.training.requests import Requests
from cacheslide_agents.training.student import Student
from cacheslide_agents.training.transfer import transfer
from torch_cacheslide.models import load_model

VOCABULARY = 256
LENGTHS = (20, 35, 50)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, support: Callable[[str], ModuleType]) -> Path:
    tiny: Any = support("tiny_models")
    found: Path = tiny.write_model(tmp_path_factory.mktemp("base"), initializer_range=0.4)
    return found


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return load_model(folder).tokenizer


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory, support: Callable[[str], ModuleType]) -> Path:
    found: Path = support("tiny_data").write_words(tmp_path_factory.mktemp("text"))
    return found


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Prompts of 17, 32 and 47 tokens, of numbers that tell them apart, with answers of three."""
    lines = [
        {"prompt_ids": [number] * (length - 3), "output_ids": [200, 201, 202]}
        for number, length in enumerate(LENGTHS)
    ]
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def read(log: Path, tokenizer: Any, longest: int = 50, seed: int = 0) -> Requests:
    return Requests([log], tokenizer, vocabulary=VOCABULARY, longest=longest, seed=seed)


def test_messages_and_their_answer_have_the_ids_that_the_model_serves(
    tokenizer: Any, tmp_path: Path
) -> None:
    tokenizer = deepcopy(tokenizer)
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    messages = [{"role": "user", "content": "one two three"}]
    log = tmp_path / "log.jsonl"
    log.write_text(json.dumps({"messages": messages, "output": "more less"}) + "\n")
    found = read(log, tokenizer, longest=1000).drawn(0)
    prompt = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    answer = tokenizer("more less", add_special_tokens=False)["input_ids"]
    assert found.ids.tolist() == [*prompt, *answer] and found.prompt == len(prompt)


def test_each_round_has_every_request_once_and_its_own_order(log: Path, tokenizer: Any) -> None:
    requests, other = read(log, tokenizer), read(log, tokenizer, seed=1)
    rounds = [[len(requests.drawn(3 * around + at).ids) for at in range(3)] for around in range(8)]
    assert all(sorted(each) == sorted(LENGTHS) for each in rounds)
    assert len({tuple(each) for each in rounds}) > 1
    assert rounds != [
        [len(other.drawn(3 * around + at).ids) for at in range(3)] for around in range(8)
    ]


def test_requests_that_are_too_long_are_counted_and_left_out(log: Path, tokenizer: Any) -> None:
    requests = read(log, tokenizer, longest=35)
    assert (len(requests), requests.too_long) == (2, 1)
    assert {len(requests.drawn(at).ids) for at in range(8)} == {20, 35}
    with pytest.raises(DataError, match=r"all 3 requests .* longer than 19 tokens"):
        read(log, tokenizer, longest=19)


@pytest.mark.parametrize(
    "line, wrong",
    [
        ({"prompt_ids": [1, VOCABULARY]}, "token 256 is beyond the model's 256"),
        ({"prompt_ids": [1], "output_ids": [300]}, "token 300 is beyond"),
        ({"question": "Who?"}, "has either 'messages'"),
    ],
)
def test_what_is_no_request_of_this_model_is_named_with_its_line(
    line: dict[str, Any], wrong: str, tmp_path: Path, tokenizer: Any
) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text(json.dumps({"prompt_ids": [1, 2]}) + "\n" + json.dumps(line) + "\n")
    with pytest.raises(DataError, match=rf"log\.jsonl:2.*{wrong}"):
        read(log, tokenizer)


@pytest.mark.parametrize("share", [0.25, 0.67])
def test_requests_have_their_share_of_the_tokens_of_each_phase(
    share: float, log: Path, text: Path, tokenizer: Any
) -> None:
    recipe = Recipe(
        transfer_tokens=6000,
        distil_tokens=3000,
        lengths=(40, 20),
        request_share=share,
        longest_request=50,
    )
    material = Material(Corpus(read_texts([text]), tokenizer, seed=0), recipe, read(log, tokenizer))
    for phase, budget in zip(PHASES, (6000, 3000), strict=True):
        windows = [w for s in range(material.steps(phase)) for w in material.windows(phase, s)]
        tokens = sum(len(each.ids) for each in windows)
        asked = [each for each in windows if 202 in each.ids.tolist()]
        assert budget <= tokens < budget + 50
        assert sum(len(each.ids) for each in asked) / tokens == pytest.approx(share, abs=0.02)
        drawn = sorted(len(each.ids) for each in asked[:3])
        assert phase == "distil" or drawn == sorted(LENGTHS)


def test_the_positions_that_predict_an_answer_have_its_weight(
    log: Path, text: Path, tokenizer: Any
) -> None:
    recipe = Recipe(lengths=(16,), request_share=1.0, answer_weight=0.6)
    material = Material(Corpus(read_texts([text]), tokenizer, seed=0), recipe, read(log, tokenizer))
    (window,) = material.windows("transfer", 1)
    predicting = window.weights[-4:]
    assert predicting.tolist() == pytest.approx([0.6 / 4] * 4)
    assert window.weights[:-4].tolist() == pytest.approx(
        [0.4 / (len(window.ids) - 4)] * (len(window.ids) - 4)
    )


def test_weights_decide_what_both_phases_learn_from(folder: Path) -> None:
    """Against the formulas in float64: a weighted mean of divergences, a ratio of energies."""
    teacher: Any = load_model(folder, dtype="float64").model
    student = Student(teacher, Recipe(npos=8)).model
    ids = torch.tensor(np.random.default_rng(0).integers(0, 256, 40))
    weights = torch.rand(40, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    window = Window(ids, weights / weights.sum())
    p = torch.log_softmax(teacher(ids[None]).logits[0], dim=-1)
    q = torch.log_softmax(student(ids[None]).logits[0], dim=-1)
    divergence = ((p.exp() * (p - q)).sum(-1) * window.weights).sum()
    assert distil(teacher, student, window, 1.0) == pytest.approx(
        float(divergence.detach()), rel=1e-6
    )

    hidden = teacher.model(ids[None], output_hidden_states=True).hidden_states
    rope = teacher.model.rotary_emb(hidden[0], torch.arange(40)[None])
    still = (torch.ones(1, 1, 1), torch.zeros(1, 1, 1))
    wanted = 0.0
    layers = zip(teacher.model.layers, student.model.layers, hidden[:2], strict=True)
    for layer, other, states in layers:
        normed = layer.input_layernorm(states)
        target = layer.self_attn(normed, position_embeddings=rope, attention_mask=None)[0][0]
        found = other.self_attn(normed, position_embeddings=still, attention_mask=None)[0][0]
        error = (found - target).square().sum(-1) @ window.weights
        wanted += float((error / (target.square().sum(-1) @ window.weights)).detach()) / 2
    assert transfer(teacher, student, window, 1.0) == pytest.approx(wanted, rel=1e-6)


def test_the_command_line_trains_on_requests_and_the_card_counts_them(
    folder: Path, tmp_path: Path, log: Path
) -> None:
    text = tmp_path / "long.jsonl"
    text.write_text(json.dumps({"text": " ".join(["seven small boats left"] * 600)}) + "\n")
    arguments = ["train", "--text", str(text), "--valid", str(text), "-m", str(folder), "--json"]
    arguments += ["--tokens", "200", "--lengths", "16", "--npos", "8", "--requests", str(log)]
    arguments += ["--longest-request", "40", "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.stderr
    card = json.loads((tmp_path / "out" / "model" / "cope.json").read_text())
    assert (card["requests"], card["too_long"]) == (2, 1)
    assert card["recipe"]["request_share"] == 0.67
