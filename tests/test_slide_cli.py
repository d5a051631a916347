"""`cacheslide cache` and the Prometheus text, over a store that was really written."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from errno import EIO, EMFILE, ENOSPC
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from cacheslide_agents.cli.commands import app
from cacheslide_agents.errors import BackendError, PageError
from cacheslide_agents.pages import ContextKey, SlideStore
from cacheslide_agents.pages.index import Index
from cacheslide_agents.pages.prometheus import Exporter


@pytest.fixture(scope="module")
def world(support: Callable[[str], ModuleType]) -> Any:
    return support("page_world")


@pytest.fixture
def store_path(tmp_path: Path, world: Any) -> Path:
    """Two tenants, three contexts, 100 tokens."""
    rng = np.random.default_rng(0)
    with SlideStore(1 << 20, tmp_path / "store", write_ahead=False) as store:
        for name, session, tokens in (("a", "one", 40), ("a", "two", 40), ("b", "one", 20)):
            context = world.context_of(
                rng.integers(0, 99, tokens), session, key=ContextKey("model", name, "task")
            )
            store.put(context, world.layers_of(tokens))
            store.flush()
    return tmp_path / "store"


def run(*arguments: str) -> Any:
    result = CliRunner().invoke(app, ["cache", *arguments])
    return result.exit_code, result.stdout, result.stderr


def run_json(*arguments: str) -> Any:
    code, out, _ = run(*arguments, "--json")
    return code, json.loads(out)


def test_ls_lists_contexts_oldest_first(store_path: Path, world: Any) -> None:
    code, rows = run_json("ls", "--store", str(store_path))
    assert code == 0
    told = [(row["namespace"], row["session"], row["tokens"], row["bytes"]) for row in rows]
    size = world.TOKEN_BYTES
    assert told == [
        ("a", "one", 40, 40 * size),
        ("a", "two", 40, 40 * size),
        ("b", "one", 20, 20 * size),
    ]
    _, only = run_json("ls", "--store", str(store_path), "--namespace", "a", "--session", "two")
    assert [row["session"] for row in only] == ["two"]
    _, table, _ = run("ls", "--store", str(store_path))
    assert all(word in table for word in ("namespace", "one", "two", "40", "20"))


def test_stat_sums_up(store_path: Path, world: Any) -> None:
    code, found = run_json("stat", "--store", str(store_path))
    assert code == 0
    assert found["contexts"] == 3 and found["extents"] == 3
    assert found["pages"] == (3 + 3 + 2) * world.LAYERS
    assert found["bytes"] == 3 * 4096 + 8 * world.BLOCK_BYTES
    assert found["tokens_by_namespace"] == {"a": 80, "b": 20}
    assert "tokens of a" in run("stat", "--store", str(store_path))[1]


def test_verify_says_which_page_is_torn_and_exits_with_one(store_path: Path, world: Any) -> None:
    code, found = run_json("verify", "--store", str(store_path))
    assert (code, found) == (0, {"holds": True, "pages": 24, "faults": []})
    assert run("verify", "--store", str(store_path))[1].startswith("ok   24 pages")
    file = sorted(store_path.glob("rank-0/extents/*"))[1]
    data = bytearray(file.read_bytes())
    page = world.BLOCK_BYTES // world.LAYERS
    data[4096 + (3 * 2 + 1) * page + 5] ^= 1  # layer 2, block 1 of 3
    file.write_bytes(bytes(data))
    code, found = run_json("verify", "--store", str(store_path))
    assert code == 1 and not found["holds"]
    assert [(f["extent"], f["layer"], f["position"]) for f in found["faults"]] == [(2, 2, 1)]
    code, out, _ = run("verify", "--store", str(store_path))
    assert code == 1 and out.startswith("FAIL") and "page 1 of layer 2" in out


def test_rm_removes_what_is_named_and_gc_frees_the_rest(store_path: Path) -> None:
    code, found = run_json("rm", "--store", str(store_path), "--namespace", "a", "--session", "one")
    assert (code, found) == (0, {"removed": 1})
    assert len(run_json("ls", "--store", str(store_path))[1]) == 2
    assert run_json("gc", "--store", str(store_path)) == (0, {"freed_bytes": 0})
    assert run_json("rm", "--store", str(store_path), "--all")[1] == {"removed": 2}
    assert run_json("ls", "--store", str(store_path)) == (0, [])
    assert list(store_path.glob("rank-0/extents/*")) == []


def full_disk(*_: Any) -> Any:
    raise OSError(ENOSPC, "No space left on device")


def test_rm_that_could_not_be_written_is_no_success(
    store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(Index, "commit", full_disk)
        code, out, error = run("rm", "--store", str(store_path), "--all")
    assert (code, out) == (2, "") and "removed" not in error.replace("what was removed", "")
    assert "may be there again at the next opening: [Errno 28]" in error
    assert "make room on the disk" in error
    assert len(run_json("ls", "--store", str(store_path))[1]) == 3


def test_gc_that_could_not_be_written_is_no_success(
    tmp_path: Path, world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with SlideStore(1 << 20, tmp_path, write_ahead=False) as store:
        for session in ("one", "two"):
            store.put(world.context_of(range(40), session), world.layers_of(40))
    assert run_json("rm", "--store", str(tmp_path), "--session", "one") == (0, {"removed": 1})
    with monkeypatch.context() as patched:
        patched.setattr(Index, "commit", full_disk)
        code, out, error = run("gc", "--store", str(tmp_path), "--json")
    assert (code, out) == (2, "") and "make room on the disk" in error
    assert run_json("gc", "--store", str(tmp_path)) == (0, {"freed_bytes": 3 * world.BLOCK_BYTES})


def test_rm_says_what_it_could_not_look_at(
    store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second, real = sorted(store_path.glob("rank-0/extents/*"))[1], Path.stat

    def stat(path: Path, **how: Any) -> os.stat_result:
        if path == second:
            raise OSError(EIO, "Input/output error")
        return real(path, **how)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "stat", stat)
        code, _, error = run("rm", "--store", str(store_path), "--all")
    assert code == 2 and "2 contexts removed, but 1 extents stay" in error
    assert [row["session"] for row in run_json("ls", "--store", str(store_path))[1]] == ["two"]
    assert run_json("rm", "--store", str(store_path), "--all") == (0, {"removed": 1})


@pytest.mark.parametrize("number", [EIO, EMFILE])
def test_verify_goes_on_past_what_cannot_be_read(
    store_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    first, real = min(store_path.glob("rank-0/extents/*")), os.open

    def refused(path: Any, *how: Any) -> int:
        if path == first:
            raise OSError(number, os.strerror(number))
        return real(path, *how)

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", refused)
        code, out, _ = run("verify", "--store", str(store_path))
    lines = out.splitlines()
    assert code == 1 and len(lines) == 9, "three blocks of three layers"
    assert all(str(first) in line and os.strerror(number) in line for line in lines)


@pytest.mark.parametrize("chosen", [[], ["--all", "--task", "task"]])
def test_rm_wants_to_know_which(store_path: Path, chosen: list[str]) -> None:
    code, _, error = run("rm", "--store", str(store_path), *chosen)
    assert code == 2 and "say which" in error
    assert len(run_json("ls", "--store", str(store_path))[1]) == 3


@pytest.mark.parametrize("command", [["ls"], ["stat"], ["verify"], ["gc"], ["rm", "--all"]])
def test_where_there_is_no_store_nothing_is_made(tmp_path: Path, command: list[str]) -> None:
    code, _, error = run(*command, "--store", str(tmp_path / "nowhere"))
    assert code == 2 and "there is no folder" in error and "nowhere" in error
    assert list(tmp_path.iterdir()) == []


def test_changing_a_store_in_use_is_refused_and_looking_is_not(store_path: Path) -> None:
    with SlideStore(1000, store_path):
        assert run("gc", "--store", str(store_path))[0] == 2
        assert "being written by process" in run("rm", "--store", str(store_path), "--all")[2]
        assert len(run_json("ls", "--store", str(store_path))[1]) == 3


def test_prometheus_text_holds_every_metric_once(store_path: Path, world: Any) -> None:
    with SlideStore(1 << 20, store_path) as store:
        context = store.contexts()[0]
        store.load(context, 0)
        with pytest.raises(PageError):
            store.load(context, 99)
        metrics = dict(store.metrics())
        families = list(text_string_to_metric_families(Exporter(store.metrics).text()))
    by_name = {family.name: family for family in families}
    assert len(by_name) == len(families)
    assert by_name["cacheslide_hits"].type == "counter"
    assert by_name["cacheslide_hits"].samples[0].value == 1
    assert by_name["cacheslide_memory_bytes"].type == "gauge"
    assert by_name["cacheslide_ssd_read_bytes"].samples[0].value == metrics["ssd_read_bytes"] > 0
    assert "cacheslide_stall_seconds" in by_name
    misses = {s.labels["reason"]: s.value for s in by_name["cacheslide_misses"].samples}
    assert misses["no_layer"] == 1 and sum(misses.values()) == metrics["misses"] == 1
    plain = {name for name in metrics if not name.startswith("misses")}
    assert len(by_name) == len(plain) + 1


def test_kernel_bytes_are_at_least_the_files_that_were_synced(tmp_path: Path, world: Any) -> None:
    with SlideStore(1 << 22, tmp_path, write_ahead=False) as store:
        context = world.context_of(range(4000))
        store.put(context, world.layers_of(4000))
        store.flush()
        metrics = store.metrics()
    if "kernel_write_bytes" not in metrics or metrics["kernel_write_bytes"] == 0:
        pytest.skip("this kernel does not count what a process writes here")
    assert metrics["kernel_write_bytes"] >= metrics["ssd_write_bytes"]
    assert metrics["write_amplification"] == metrics["ssd_write_bytes"] / metrics["dirtied_bytes"]


def test_without_the_client_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "prometheus_client", None)
    with pytest.raises(BackendError, match=r"cacheslide-agents\[metrics\]"):
        Exporter(dict)
