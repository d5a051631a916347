"""The flags of `cacheslide serve` that are vLLM's: what it refuses, and what is not the user's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from cacheslide_agents.errors import RequestError

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own, at its import

TRANSFER = {
    "kv_connector": "CacheSlideConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"store_bytes": 5},
}
OURS = ["--model", "m", "--kv-transfer-config", json.dumps(TRANSFER), "--worker-cls", "ours"]
SET = r"^{} is set by `cacheslide serve` itself; leave it out$"


@pytest.fixture(autouse=True)
def installed(support: Callable[[str], ModuleType]) -> None:
    if missing := support("vllm_engines").MISSING:
        pytest.skip(missing)


def parsed(*flags: str) -> Any:
    from vllm_cacheslide.serve import parsed

    return parsed([*OURS, *flags], flags)


def test_what_is_vllms_own_is_read_as_vllm_reads_it() -> None:
    args = parsed("--port", "81", "--compilation-config.mode", "0", "--max_model_len=1k")
    assert (args.port, int(args.compilation_config.mode), args.max_model_len) == (81, 0, 1000)
    assert (args.model, args.worker_cls) == ("m", "ours")
    assert args.kv_transfer_config.kv_connector_extra_config == {"store_bytes": 5}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--enable-auto-tool-choice"], "flags: .*--enable-auto-tool-choice requires --tool-call-"),
        (["--enable-log-outputs"], "flags: .*--enable-log-outputs requires --enable-log-requests"),
        (["--chat-template", "nowhere.jinja"], r"--chat-template: .*\(nowhere\.jinja\) appears"),
        (["--chat_template=nowhere.jinja"], r"--chat-template: .*\(nowhere\.jinja\) appears"),
        (["--grpc-port", "1"], "flags: --grpc-port requires"),
        (["--config", "nowhere.yaml"], r"--config: .*No such file or directory: 'nowhere\.yaml'"),
        (["--config"], "--config: No config file specified!"),
    ],
)
def test_what_vllm_refuses_is_one_error_that_names_the_flag(flags: list[str], message: str) -> None:
    with pytest.raises(RequestError, match=f"^vLLM refuses (the )?{message}"):
        parsed(*flags)


def test_a_dotted_flag_without_its_value_is_named() -> None:
    with pytest.raises(RequestError, match=r"^--compilation-config\.mode lacks its value$"):
        parsed("--port", "81", "--compilation-config.mode")


def test_what_argparse_refuses_ends_with_its_own_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parsed("--port", "x")
    assert ended.value.code == 2
    assert "argument --port: invalid int value: 'x'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "named"),
    [
        ("--kv-transfer-config.kv_role=kv_producer", "--kv-transfer-config"),
        ("--kv_transfer_config.kv_connector_extra_config.x", "--kv-transfer-config"),
        ("--worker-cls.x=y", "--worker-cls"),
        ("--kv-offloading-size=4", "--kv-offloading-size"),
    ],
)
def test_flags_that_would_replace_ours_are_refused_before_anything_is_read(
    flag: str, named: str
) -> None:
    from vllm_cacheslide.serve import arguments

    with pytest.raises(RequestError, match=SET.format(named)):
        arguments("m", ["--port", "1", flag, "x"], {})


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--kv-transfer-conf", "{}"], "--kv-transfer-config"),
        (["--kv-transfer-conf.kv_role=kv_both"], "--kv-transfer-config"),
        (["--worker-c=other"], "--worker-cls"),
        (["--kv-offloading-s", "4"], "--kv-offloading-size"),
    ],
)
def test_abbreviated_they_are_refused_all_the_same(flags: list[str], named: str) -> None:
    with pytest.raises(RequestError, match=SET.format(named)):
        parsed(*flags)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("kv-transfer-config.kv_role: kv_producer", "--kv-transfer-config"),
        ("kv-offloading-size: 4", "--kv-offloading-size"),
    ],
)
def test_from_a_file_they_are_refused_all_the_same(tmp_path: Path, line: str, named: str) -> None:
    (tmp_path / "flags.yaml").write_text(f"{line}\n")
    with pytest.raises(RequestError, match=SET.format(named)):
        parsed("--config", str(tmp_path / "flags.yaml"))


def test_a_second_model_is_refused() -> None:
    with pytest.raises(RequestError, match=r"^a second model, 'other'; one is served"):
        parsed("other")


@pytest.mark.parametrize("option", ["kv_transfer_config", "worker_cls", "kv_offloading_size"])
def test_the_backend_keeps_its_connector(option: str, tiny_model: str) -> None:
    from vllm_cacheslide.launch import engine_args

    with pytest.raises(RequestError, match=f"^{option} is set by the backend itself; leave it out"):
        engine_args(tiny_model, {}, {option: None})
    mine = "my_package:MyProcessor"
    args = engine_args(tiny_model, {}, {"logits_processors": [mine], "max_logprobs": 3})
    assert args.logits_processors == ["vllm_cacheslide.forced:ForcedTokens", mine]
    assert args.max_logprobs == 3
