"""Bad input of every kind is one clear error of ours: no traceback, no hang, no wrong answer."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from cacheslide_agents.backend import GenerationRequest, Sampling, load_backend
from cacheslide_agents.chunks import Chunk, ChunkedPrompt, Message, Role, Span
from cacheslide_agents.cli.console import emit, open_streams
from cacheslide_agents.cli.templates import find_template, read_values
from cacheslide_agents.errors import (
    BackendError,
    DataError,
    ModelLoadError,
    ModelNotFoundError,
    PromptError,
    RequestError,
    TemplateError,
)
from cacheslide_agents.policies import Epic
from cacheslide_agents.prompt.auto import chunk_messages
from cacheslide_agents.prompt.chat import ChatEncoder
from cacheslide_agents.prompt.template import PromptTemplate
from torch_cacheslide import TorchBackend
from torch_cacheslide.locate import locate
from torch_cacheslide.models import load_model


@pytest.fixture
def folder(support: Callable[[str], ModuleType], tmp_path: Path) -> Path:
    made: Path = support("tiny_models").write_model(tmp_path / "model")
    return made


@pytest.fixture
def tiny(folder: Path) -> Iterator[TorchBackend]:
    backend = TorchBackend(str(folder), device="cpu")
    yield backend
    backend.close()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 1.5),
        ("max_tokens", None),
        ("temperature", "hot"),
        ("temperature", float("nan")),
        ("top_p", None),
        ("top_k", 1.5),
        ("seed", "x"),
        ("stop", "abc"),
        ("stop", (1,)),
        ("stop", None),
        ("stop_token_ids", 5),
        ("stop_token_ids", ("a",)),
    ],
)
def test_a_decoding_parameter_of_the_wrong_kind_is_named(name: str, value: object) -> None:
    with pytest.raises(RequestError, match=f"^{name}="):
        Sampling(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["namespace", "task", "session"])
def test_a_key_of_isolation_is_a_string(name: str) -> None:
    given: dict[str, Any] = {name: ["a"]}
    with pytest.raises(RequestError, match=f"^{name}="):
        GenerationRequest([1], **given)


@pytest.mark.parametrize("ids", [[1.7, 2], ["a"], [None], [[1], [2, 3]], None, "abc"], ids=repr)
def test_ids_that_are_no_whole_numbers_are_refused_and_never_cut_off(
    tiny: TorchBackend, ids: Any
) -> None:
    with pytest.raises(RequestError, match="prompt_ids must be one flat sequence of integer"):
        tiny.generate(GenerationRequest(ids))
    with pytest.raises(RequestError, match="continuation_ids must be one flat sequence"):
        tiny.score(GenerationRequest([1, 2]), ids)


@pytest.mark.parametrize("threads", [0, -1, 1.5, 10**12])
def test_a_number_of_threads_that_cannot_be_is_refused(threads: Any) -> None:
    with pytest.raises(RequestError, match="threads="):
        TorchBackend("never loaded", threads=threads)


def test_warming_checks_the_spans_of_chunks_kept_alone(tiny: TorchBackend) -> None:
    spans = (Span("a", Role.REUSE, 0, 9, "x"),)
    with pytest.raises(RequestError, match="must partition the prompt"):
        tiny.warm(GenerationRequest([1, 2, 3], spans, policy=Epic()))


def test_a_store_budget_that_is_no_number_of_bytes_is_refused(folder: Path) -> None:
    with pytest.raises(RequestError, match="store_bytes=nan must be a whole number"):
        TorchBackend(str(folder), device="cpu", store_bytes=float("nan"))  # type: ignore[arg-type]


def test_an_option_that_a_backend_does_not_take_is_a_backend_error() -> None:
    with pytest.raises(BackendError, match="unexpected keyword argument 'colour'"):
        load_backend("torch", colour="red")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_is_told_that_the_worker_stayed_behind(tiny: TorchBackend) -> None:
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            list(tiny.generate(GenerationRequest([1, 2])))
        except BackendError as error:
            os._exit(7 if "process forks" in str(error) else 8)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


@pytest.mark.parametrize("name", ["x" * 5000, "~nobody-of-this-name/model", None])
def test_a_name_that_can_be_no_model_is_not_found(name: Any) -> None:
    with pytest.raises(ModelNotFoundError, match="can name no model"):
        locate(name)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", "[" * 200_000),
        ("model.safetensors.index.json", '{"weight_map": []}'),
        ("model.safetensors.index.json", '{"weight_map": {"a": 3}}'),
    ],
    ids=["nested", "list", "number"],
)
def test_a_json_file_that_is_not_what_it_should_be_is_named(
    folder: Path, file: str, content: str
) -> None:
    (folder / file).write_text(content)
    with pytest.raises(ModelLoadError, match=file):
        load_model(folder)


@pytest.mark.parametrize("theta", [0, -5.0, "x"])
def test_rotary_parameters_that_give_no_angles_are_refused(
    support: Callable[[str], ModuleType], folder: Path, theta: object
) -> None:
    rope = {"rope_type": "default", "rope_theta": theta}
    support("tiny_models").edit_config(folder, rope_parameters=rope)
    with pytest.raises(ModelLoadError, match="rotary parameters"):
        load_model(folder)


@pytest.mark.parametrize(
    "body",
    [
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{% for i in [1] %}" * 30 + "{% endfor %}" * 30,
    ],
    ids=["parentheses", "loops"],
)
def test_a_template_that_nests_too_deeply_is_a_template_error(body: str) -> None:
    with pytest.raises(TemplateError, match="nest too deeply"):
        PromptTemplate.from_string('{% message "user" %}' + body + "{% endmessage %}")


def test_a_template_name_too_long_for_a_file_is_unknown() -> None:
    with pytest.raises(TemplateError, match="no packaged template"):
        find_template("x" * 5000)


def test_values_nested_without_end_are_a_data_error(tmp_path: Path) -> None:
    path = tmp_path / "values.json"
    path.write_text("[" * 200_000)
    with pytest.raises(DataError, match=r"values\.json: values are not JSON"):
        read_values(str(path))


@pytest.mark.parametrize("messages", ["abc", [5], [{"role": "assistant", "tool_calls": 5}]])
def test_messages_that_are_none_are_named(messages: Any) -> None:
    with pytest.raises(PromptError, match="message 0: "):
        chunk_messages(messages)


def test_what_is_no_text_is_named_wherever_it_comes_in(tokenizers: Callable[[str], Any]) -> None:
    encoder = ChatEncoder(tokenizers("qwen"))
    prompt = ChunkedPrompt((Message("user", (Chunk("a", "x"),)),))
    with pytest.raises(PromptError, match="chunk 'b' holds a NoneType, not text"):
        encoder.encode(ChunkedPrompt((Message("user", (Chunk("b", None),)),)))  # type: ignore[arg-type]
    named = {"type": "function", "function": {"name": "f\ud800"}}
    with pytest.raises(PromptError, match="not Unicode text: lone surrogate"):
        encoder.encode(prompt, tools=[named])
    with pytest.raises(PromptError, match="must be JSON data"):
        encoder.encode(prompt, tools=[{**named, "extra": object()}])


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_stdout_takes_every_character_as_valid_json(
    monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding))
    open_streams()
    emit({"text": "é\ud800"})
    sys.stdout.flush()
    assert json.loads(raw.getvalue().decode(encoding)) == {"text": "é\ud800"}
