"""`cacheslide serve` hands a model, our settings and the engine's own flags to a server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from cacheslide_agents.cli import serve
from cacheslide_agents.cli.commands import app

Served = tuple[str, list[str], dict[str, Any]]


class Entry:
    """An entry point that gives `found`, or raises it."""

    def __init__(self, found: Callable[..., None] | ImportError) -> None:
        self._found = found

    def load(self) -> Callable[..., None]:
        if isinstance(self._found, ImportError):
            raise self._found
        return self._found


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Served]:
    """What a server was started with."""
    calls: list[Served] = []

    def start(model: str, flags: list[str], settings: dict[str, Any]) -> None:
        calls.append((model, flags, settings))

    monkeypatch.setattr(serve, "entry_points", lambda **_: [Entry(start)])
    return calls


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["serve", *arguments])


def test_the_engines_flags_are_left_as_they_are(served: list[Served]) -> None:
    done = run("smollm2-135m", "--port", "1", "--policy=prefix", "--api-key", "a", "b", "-tp=2")
    assert done.exit_code == 0, done.output
    ((model, flags, settings),) = served
    assert (model, settings["policy"]) == ("smollm2-135m", "prefix")
    assert flags == ["--port", "1", "--api-key", "a", "b", "-tp=2"]


def test_settings_are_in_the_servers_units(served: list[Served]) -> None:
    run("m", "--store-gib", "0.5", "--tenant-header", "X-Team", "--attention", "masked")
    assert served[0][2] == {
        "policy": "cacheslide",
        "store_bytes": 1 << 29,
        "store_path": None,
        "disk_bytes": 64 << 30,
        "eviction": "slide",
        "ttl_s": None,
        "namespace_quota_bytes": None,
        "tenant_quota_bytes": None,
        "attention": "masked",
        "profiles": [],
        "tenant_header": "X-Team",
    }


def test_profiles_are_found_wherever_the_server_runs(
    served: list[Served], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run("m", "--profiles", "one", "--profiles", "/two")
    assert served[0][2]["profiles"] == [str(tmp_path / "one"), "/two"]


def test_settings_of_the_ssd_tier_are_in_the_servers_units(
    served: list[Served], tmp_path: Path
) -> None:
    tier = ("--store-path", str(tmp_path), "--disk-gib", "2", "--eviction", "lru_write_back")
    run("m", *tier, "--ttl-s", "60", "--namespace-gib", "0.25", "--tenant-gib", "0.5")
    settings = served[0][2]
    assert settings["store_path"] == str(tmp_path)
    assert (settings["disk_bytes"], settings["namespace_quota_bytes"]) == (2 << 30, 1 << 28)
    assert settings["tenant_quota_bytes"] == 1 << 29
    assert (settings["eviction"], settings["ttl_s"]) == ("lru_write_back", 60.0)


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--store-gib", "inf", "--store-gib=inf is no size; give a finite number of GiB"),
        ("--disk-gib", "inf", "--disk-gib=inf is no size"),
        ("--namespace-gib", "inf", "--namespace-gib=inf is no size"),
        ("--tenant-gib", "inf", "--tenant-gib=inf is no size"),
        ("--store-path", "~nobody-here/x", "--store-path='~nobody-here/x' is no path"),
        ("--profiles", "~nobody-here/x", "--profiles='~nobody-here/x' is no path"),
    ],
)
def test_sizes_and_paths_that_are_none_are_bad_input(
    served: list[Served], flag: str, value: str, message: str
) -> None:
    done = run("m", flag, value)
    assert (done.exit_code, served) == (2, [])
    assert message in " ".join(done.output.split())


def test_a_flag_before_the_model_is_bad_input(served: list[Served]) -> None:
    done = run("--port", "1", "m")
    assert (done.exit_code, served) == (2, [])
    assert "name the model before the first flag, here --port" in " ".join(done.output.split())


def test_a_server_that_is_not_installed_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for entries in ([], [Entry(ImportError("No module named 'vllm'"))]):
        monkeypatch.setattr(serve, "entry_points", lambda entries=entries, **_: entries)
        done = run("m")
        assert done.exit_code == 2
        assert "pip install 'cacheslide-agents[vllm]'" in " ".join(done.output.split())
