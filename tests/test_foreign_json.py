"""JSON files of unknown origin: whatever they hold, a `DataError` that names file and place."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cacheslide_agents.bench.datasets import hotpot_questions, texts
from cacheslide_agents.bench.replay import ReplayModel
from cacheslide_agents.bench.results import read_json, read_results
from cacheslide_agents.cli.commands import app
from cacheslide_agents.errors import DataError, ModelLoadError
from cacheslide_agents.weights.checkpoint import tensor_entries
from torch_cacheslide.adapter import Adapter

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"
NESTED = "[" * 200_000


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.name)
def test_every_published_result_is_read(path: Path) -> None:
    found = read_json(path)
    if "study" not in found:
        assert read_results(path).rows


@pytest.fixture
def published() -> Any:
    return read_json(RESULTS / "memgpt.json")


@pytest.mark.parametrize(
    ("name", "spelled", "message"),
    [
        ("ttft_s", "NaN", "NaN is no number to reckon with"),
        ("ttft_s", "-Infinity", "-Infinity is no number to reckon with"),
        ("ttft_s", "1e999", "1e999 is no number to reckon with"),
        ("prompt_tokens", "1" + "0" * 400, "10000000000000000000 is no number to reckon with"),
        ("ttft_s", "-0.5", r"rows\[1\]: 'ttft_s' is -0\.5; it must be at least 0"),
        ("prompt_tokens", "0", r"rows\[1\]: 'prompt_tokens' is 0; it must be at least 1"),
        ("reused_tokens", "-1", r"rows\[1\]: 'reused_tokens' is -1; it must be at least 0"),
        ("policy", '"gone"', None),
    ],
)
def test_figures_that_cannot_be_are_refused(
    published: Any, tmp_path: Path, name: str, spelled: str, message: str | None
) -> None:
    path = tmp_path / "run.json"
    published["rows"][1][name] = "HERE"
    path.write_text(json.dumps(published).replace('"HERE"', spelled), encoding="utf-8")
    if message is None:
        assert read_results(path).rows[1].policy == "gone"
        return
    with pytest.raises(DataError, match=rf"run\.json: .*{message}"):
        read_results(path)


def test_a_summary_without_rows_is_refused(published: Any, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    published["rows"] = [row for row in published["rows"] if row["policy"] != "cacheslide"]
    path.write_text(json.dumps(published), encoding="utf-8")
    with pytest.raises(DataError, match=r"run\.json: the summary's 'cacheslide' has no row"):
        read_results(path)


def test_prices_that_are_not_finite_are_one_line(
    published: Any, tmp_path: Path, tiny_model: str
) -> None:
    log, prices = tmp_path / "log.jsonl", tmp_path / "run.json"
    log.write_text('{"prompt_ids": [1, 2, 3]}\n')
    published["rows"][0]["ttft_s"] = float("inf")
    prices.write_text(json.dumps(published))
    arguments = ["replay", str(log), "--prices", str(prices), "--model", tiny_model, "--json"]
    result = CliRunner().invoke(app, arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"error: {prices}: not JSON (Infinity is no number to reckon with)\n"


@pytest.mark.parametrize(
    "change",
    [
        {"num_attention_heads": 0},
        {"num_hidden_layers": 0},
        {"num_hidden_layers": float("inf")},
        {"hidden_size": 10**200},
        {"hidden_size": 10**400},
        {"max_position_embeddings": float("inf")},
        {"max_position_embeddings": float("nan")},
        NESTED,
    ],
    ids=lambda change: str(change)[:40],
)
def test_a_config_that_describes_no_decoder_is_a_data_error(
    tiny_model: str, tmp_path: Path, change: dict[str, Any] | str
) -> None:
    for file in Path(tiny_model).glob("tokenizer*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((Path(tiny_model) / "config.json").read_text()) | {"head_dim": None}
    text = change if isinstance(change, str) else json.dumps(config | change)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(DataError, match=r"config\.json does not describe a decoder"):
        ReplayModel.read(tmp_path)


@pytest.mark.parametrize("name", ["log.jsonl", "log.txt"])
def test_a_line_of_a_log_that_nests_without_end_is_named(tmp_path: Path, name: str) -> None:
    log = tmp_path / name
    log.write_text('{"messages": []}\n' + NESTED + "\n")
    result = CliRunner().invoke(app, ["why", f"{log}:2", str(log)])
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"{log}:2: not JSON" in " ".join(result.stderr.split())


def test_text_that_begins_with_brackets_is_text(tmp_path: Path) -> None:
    text = tmp_path / "prompt.txt"
    text.write_text("[" * 2000)
    assert CliRunner().invoke(app, ["why", str(text), str(text)]).exit_code == 0


@pytest.mark.parametrize(
    ("read", "line", "message"),
    [
        (texts, NESTED, r"data\.jsonl:2: not JSON"),
        (texts, '{"text": "a\\ud800"}', r"data\.jsonl:2: 'text' is not Unicode text: lone"),
        (hotpot_questions, '{"id": "\\udfff"}', r"data\.jsonl:2: 'id' is not Unicode text"),
    ],
)
def test_a_bad_record_of_the_data_folder_is_named(
    tmp_path: Path, read: Callable[[Path], Any], line: str, message: str
) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(f"\n{line}\n")
    with pytest.raises(DataError, match=message):
        read(path)


def test_records_of_the_data_folder_may_hold_any_separator_and_a_byte_order_mark(
    tmp_path: Path,
) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(
        '\ufeff{"text": "a\u2028b\x85c"}\r\n{"text": "d"}', encoding="utf-8", newline=""
    )
    assert texts(path) == ["a\u2028b\x85c", "d"]


@pytest.mark.parametrize("study", [[1], {"a": 1}, 5])
def test_a_study_whose_name_is_none_is_refused(tmp_path: Path, study: Any) -> None:
    path = tmp_path / "study.json"
    path.write_text(json.dumps({"schema": 1, "study": study, "points": [{"a": 1}]}))
    result = CliRunner().invoke(app, ["report", str(path)])
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"{path}: 'study' is a {type(study).__name__}; it must be a name" in result.stderr


def test_an_adapters_card_with_a_number_beyond_all_numbers_is_refused(tmp_path: Path) -> None:
    bound = {"a": {"digest": "d", "values": [10**400]}}
    (tmp_path / "cope.json").write_text(json.dumps({"format": 1, "bound": bound}))
    with pytest.raises(ModelLoadError, match=r"cope\.json is not the card of a conversion"):
        Adapter.read(tmp_path)


@pytest.mark.parametrize("offsets", [[-900, 8], [8, 0], [0.0, 8.0], [0, 8, 8]])
def test_a_tensor_that_lies_nowhere_is_refused(tmp_path: Path, offsets: list[float]) -> None:
    places = {"a": [0, 8], "b": offsets}
    head = json.dumps(
        {name: {"dtype": "F32", "shape": [2], "data_offsets": at} for name, at in places.items()}
    ).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(head).to_bytes(8, "little") + head + bytes(8))
    with pytest.raises(ModelLoadError, match=r"model\.safetensors is not a safetensors file"):
        tensor_entries(tmp_path)
