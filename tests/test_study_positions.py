"""The studies of positions and layers, and `cacheslide calibrate`, on a tiny pair of models."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner, Result

from cacheslide_agents.bench import run_study
from cacheslide_agents.bench.bootstrap import mean_interval
from cacheslide_agents.bench.curve_plot import plot_curves
from cacheslide_agents.bench.metrics import first_line, token_f1
from cacheslide_agents.bench.results import write_json
from cacheslide_agents.bench.runner import window_limits
from cacheslide_agents.bench.studies.answer_turns import answer_drafts
from cacheslide_agents.bench.studies.layers import layer_curves
from cacheslide_agents.bench.studies.padding import changed_update, padded
from cacheslide_agents.bench.studies.pmkd import CHUNK, HEAD, UPDATE, Passage
from cacheslide_agents.chunks import EncodedPrompt, Role, Span
from cacheslide_agents.cli.commands import app
from cacheslide_agents.errors import DataError
from cacheslide_agents.position.profile import Profile
from cacheslide_agents.prompt.chat import ChatEncoder
from torch_cacheslide import TorchBackend
from torch_cacheslide.cope import cope_from_llama

SENTENCES = " ".join(f"Sentence {number} speaks of item {number * 7}." for number in range(600))
SHIFT = 40


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, support: Callable[[str], ModuleType]) -> Path:
    folder: Path = support("tiny_data").write_tiny_data(tmp_path_factory.mktemp("data"))
    (folder / "text").mkdir()
    (folder / "text" / "valid.jsonl").write_text(json.dumps({"text": SENTENCES}) + "\n")
    return folder


@pytest.fixture(scope="module")
def cope(tmp_path_factory: pytest.TempPathFactory, tiny_model: str, smollm2_tokenizer: Any) -> str:
    folder = tmp_path_factory.mktemp("tiny-cope")
    model = cope_from_llama(AutoModelForCausalLM.from_pretrained(tiny_model), npos=24)
    torch.manual_seed(7)
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.cope_embedding, std=0.5)
    model.save_pretrained(folder)
    smollm2_tokenizer.save_pretrained(folder)
    return str(folder)


def study(name: str, data: Path, model: str, **options: Any) -> dict[str, Any]:
    backend = TorchBackend(model, device="cpu")
    try:
        return run_study(name, data=data, backend=backend, out=data / f"{name}.json", **options)
    finally:
        backend.close()


def chunk_keys(model: str, passage: Passage, shift: int) -> list[torch.Tensor]:
    """[tokens, kv_heads, head_dim] of each layer, without positions, by transformers alone."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(model)
    found: list[torch.Tensor] = []
    for layer in loaded.model.layers:
        layer.self_attn.k_proj.register_forward_hook(lambda *given: found.append(given[2][0]))
    with torch.no_grad():
        loaded(torch.tensor([passage.prompt(shift).ids]))
    start = HEAD + UPDATE + shift
    return [keys[start : start + CHUNK].view(CHUNK, 2, -1) for keys in found]


def test_pmkd_shows_what_a_shift_does_to_keys(data: Path, tiny_model: str, cope: str) -> None:
    found = study("pmkd", data, tiny_model, cope_model=cope, shifts=(0, SHIFT), limit=1)
    curves = {name: dict(points) for name, points in found["curves"].items()}
    assert list(curves) == ["RoPE unrealigned", "RoPE realigned", "CoPE", "CCPE"]
    for name in ("RoPE unrealigned", "RoPE realigned", "CoPE"):
        assert curves[name][0] == pytest.approx(1.0, abs=1e-5)
    assert curves["CCPE"][0] < 0.9999  # not the plain dense run, even where nothing moved
    assert curves["RoPE unrealigned"][SHIFT] < curves["RoPE realigned"][SHIFT] < 1.0
    assert json.loads((data / "pmkd.json").read_text()) == found

    backend = TorchBackend(tiny_model, device="cpu")
    ids = backend.tokenizer(SENTENCES, add_special_tokens=False)["input_ids"]
    backend.close()
    passage = Passage(tuple(ids[: HEAD + UPDATE + CHUNK + 1 + SHIFT]))
    for name, model in (("RoPE realigned", tiny_model), ("CoPE", cope)):
        pairs = zip(chunk_keys(model, passage, 0), chunk_keys(model, passage, SHIFT), strict=True)
        wanted = [float(torch.cosine_similarity(*pair, dim=-1).mean()) for pair in pairs]
        assert curves[name][SHIFT] == pytest.approx(np.mean(wanted), abs=1e-4)


def test_padding_compares_a_fixed_window_with_free_length(data: Path, tiny_model: str) -> None:
    found = study("padding", data, tiny_model, fillers=(0, 64), limit=1)
    curves = {name: dict(points) for name, points in found["curves"].items()}
    assert list(curves) == ["free length, reused", "padded, reused", "padded, dense"]
    free, reused, dense = curves.values()
    assert free[64] > 0
    assert dense[64] > 0
    assert reused[64] != reused[0]  # the filler is in the prompt that is scored


def generated(model: str, prompt: EncodedPrompt) -> str:
    """The first line of a greedy answer, by transformers alone."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(model)
    ids = torch.tensor([prompt.ids])
    answer = loaded.generate(ids, max_new_tokens=24, do_sample=False)[0, ids.shape[1] :]
    text = AutoTokenizer.from_pretrained(model).decode(answer, skip_special_tokens=True)
    return first_line(text)


def test_a_converted_models_answers_stand_beside_its_bases(
    data: Path, tiny_model: str, cope: str, smollm2_tokenizer: Any
) -> None:
    found = study("converted", data, tiny_model, cope_model=cope, limit=2)
    encode = ChatEncoder(smollm2_tokenizer).encode
    window = AutoConfig.from_pretrained(tiny_model).max_position_embeddings
    drafts = answer_drafts(data, window_limits(smollm2_tokenizer, window, encode, 4096), seed=0)
    held_out = [draft for draft in drafts["reflexion"] if int(draft.id[1:]) % 2 == 0]
    turns = [draft.build() for draft in held_out[:2]]
    assert [row["id"] for row in found["rows"]] == [turn.id for turn in turns if turn]
    for row, turn in zip(found["rows"], turns, strict=True):
        assert turn is not None
        prompt = encode(turn.measure)
        assert row["prompt_tokens"] == len(prompt.ids)
        for way, model in (("base", tiny_model), ("converted", cope)):
            assert row[way] == generated(model, prompt)
            assert row[f"f1_{way}"] == token_f1(row[way], turn.answers)
    point, whole = found["points"]
    assert (point["part"], whole["part"]) == ("held out", "all")
    assert {**point, "part": "all"} == whole
    assert (point["n"], point["questions"], point["changed"]) == (2, 11, 1.0)
    resumed = {**found, "rows": [row | {"f1_converted": 1.0} for row in found["rows"]]}
    write_json(data / "converted.json", resumed)
    again = study("converted", data, tiny_model, cope_model=cope, limit=7, resume=True)
    assert [row["held_out"] for row in again["rows"]] == [True] * 6 + [False]
    assert [point["n"] for point in again["points"]] == [6, 7]
    resumed_only = study("converted", data, tiny_model, cope_model=cope, limit=2, resume=True)
    point = resumed_only["points"][0]
    gains = [1.0 - row["f1_base"] for row in found["rows"]]
    assert point["f1_difference"] == pytest.approx(np.mean(gains))
    assert (point["f1_low"], point["f1_high"]) == pytest.approx(mean_interval(gains))


def test_a_padded_update_is_equally_long_in_both_turns() -> None:
    def prompt(update: int) -> EncodedPrompt:
        parts = (("a", "reuse", 4), ("u", "recompute", update), ("b", "reuse", 6))
        spans: list[Span] = []
        for name, role, count in parts:
            start = spans[-1].stop if spans else 0
            spans.append(Span(name, Role(role), start, start + count, f"{name}{count}"))
        return EncodedPrompt(tuple(range(spans[-1].stop)), tuple(spans), "", "t")

    old, new = prompt(3), prompt(7)
    assert changed_update(old, new) == ("u", 7)
    before, now = (padded(each, "u", 9, 99) for each in (old, new))
    assert before.ids == (*range(7), *[99] * 6, *range(7, 13))
    assert now.ids == (*range(11), 99, 99, *range(11, 17))
    for each in (before, now):
        assert [(span.start, span.stop) for span in each.spans] == [(0, 4), (4, 13), (13, 19)]
    with pytest.raises(DataError, match="no chunk of role recompute changed"):
        changed_update(old, old)


def test_layers_compares_deviations_of_neighbours(data: Path, tiny_model: str) -> None:
    found = study("layers", data, tiny_model, limit=1)
    likeness = dict(found["curves"]["CKSim, cached with dense"])
    assert likeness[0] == pytest.approx(1.0, abs=1e-6)  # layer 0 has not seen the context
    assert all(likeness[layer] < 1.0 for layer in (1, 2, 3))
    assert dict(found["curves"]["top 26 % shared with layer 1"])[1] == 1.0


def test_layer_curves_of_known_deviations() -> None:
    rising = torch.arange(100, dtype=torch.float64)
    deviations = [torch.zeros(100), rising, rising.square(), rising.flip(0), rising.roll(13)]
    found = {(curve, layer): value for curve, layer, value in layer_curves(deviations)}
    rank, following, first = (
        "rank correlation with the next layer",
        "top 26 % shared with the next layer",
        "top 26 % shared with layer 1",
    )
    assert found[rank, 1] == pytest.approx(1.0)
    assert found[rank, 2] == pytest.approx(-1.0)
    assert (found[following, 1], found[following, 2]) == (1.0, 0.0)
    assert [found[first, layer] for layer in (1, 2, 3, 4)] == [1.0, 1.0, 0.0, 13 / 26]
    assert not any(layer == 0 for _, layer in found)


def test_curves_are_plotted_with_their_names(tmp_path: Path) -> None:
    found = {"study": "pmkd", "x": "shift", "y": "CKSim", "curves": {"RoPE": [[0, 1.0], [9, 0.2]]}}
    (tmp_path / "pmkd.json").write_text(json.dumps(found))
    path = tmp_path / "pmkd.svg"
    result = CliRunner().invoke(app, ["report", str(tmp_path / "pmkd.json"), "--plot", str(path)])
    assert result.exit_code == 0, result.output
    drawn = path.read_text(encoding="utf-8")
    for text in ("pmkd", "shift", "CKSim", "RoPE"):
        assert f"<!-- {text} -->" in drawn
    with pytest.raises(DataError, match="curve 'a' must be a list"):
        plot_curves({"curves": {"a": [[1, None]]}}, path)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def test_a_profile_is_learnt_and_used_on_the_command_line(tmp_path: Path, cope: str) -> None:
    paragraphs = [{"title": "Mill", "text": "The mill stands by the water."}]
    values = {"examples": [], "paragraphs": paragraphs, "question": "Where does it stand?"}
    lines = [
        {"template": "reflexion", "values": {**values, "reflections": said}}
        for said in ([], ["Look twice."], ["Look twice.", "Name the place."])
    ]
    trace, asked = tmp_path / "trace.jsonl", tmp_path / "values.json"
    trace.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    asked.write_text(json.dumps({**values, "reflections": ["Read on."]}))
    out = tmp_path / "profiles"
    learnt = run("calibrate", str(trace), "--model", cope, "--out", str(out), "--json")
    assert learnt.exit_code == 0, learnt.output
    (made,) = json.loads(learnt.stdout)["profiles"]
    (entry,) = made["entries"]
    assert (made["task"], entry["chunk"], entry["update"]) == (
        "reflexion",
        "context",
        "reflections",
    )
    assert entry["prompts"] == 3
    assert Profile.read(Path(made["path"])).npos == 24

    ask = ("generate", "--template", "reflexion", "--values", str(asked), "--max-tokens", "1")
    answer = run(*ask, "--model", cope, "--profiles", str(out), "--json")
    assert answer.exit_code == 0, answer.output
    assert json.loads(answer.stdout)["receipt"]["ccpe"] > 20


def test_a_workload_teaches_as_well(data: Path, tmp_path: Path, cope: str) -> None:
    found = run(
        *("calibrate", "--task", "reflexion", "--data", str(data), "--model", cope),
        *("--out", str(tmp_path), "--prompts", "2"),
    )
    assert found.exit_code == 0, found.output
    assert "context" in found.stdout
    assert (tmp_path / "reflexion.ccpe.safetensors").is_file()


def test_calibrating_wants_a_source_and_a_cope_model(data: Path, tiny_model: str) -> None:
    for arguments, message in (
        (("--task", "reflexion"), "give either TRACE, or --task with --data"),
        (("--task", "reflexion", "--data", str(data), "--model", tiny_model), "cacheslide train"),
    ):
        result = run("calibrate", *arguments)
        assert result.exit_code == 2, result.output
        assert message in " ".join(result.stderr.split())


def test_a_second_model_goes_with_studies_that_compare(data: Path) -> None:
    result = run("bench", "--study", "length", "--data", str(data), "--cope-model", "x")
    assert result.exit_code == 2
    assert "--cope-model goes with --study converted, layers, padding, pmkd" in " ".join(
        result.stderr.split()
    )
