"""How an engine's parts start and end, without it: what fails then, who is told, what is let go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from cacheslide_agents.errors import (
    BackendError,
    ModelNotFoundError,
    StoreError,
    UnsupportedModelError,
)
from vllm_cacheslide.settings import Settings

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own, at its import


@pytest.fixture(autouse=True)
def installed(support: Callable[[str], ModuleType]) -> None:
    if missing := support("vllm_engines").MISSING:
        pytest.skip(missing)


class Thread:
    """Stands in for the engine's; `answers` are errors by the name of the workers' method."""

    answers: dict[str, Exception]
    made: list[Thread]

    def __init__(self, _: Any) -> None:
        self.closed = 0
        type(self).made.append(self)

    def call(self, work: Callable[[Any], Any]) -> Any:
        return work(self)

    def collective_rpc(self, method: str, args: Any) -> list[str]:
        if method in self.answers:
            raise self.answers[method]
        return [""]

    def get_tokenizer(self) -> None:
        if "tokenizer" in self.answers:
            raise self.answers["tokenizer"]

    @property
    def vllm_config(self) -> Any:
        text = SimpleNamespace(num_hidden_layers=2)
        config = {"max_model_len": 9, "hf_text_config": text, "get_vocab_size": lambda: 9}
        return SimpleNamespace(model_config=SimpleNamespace(**config))

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def thread(monkeypatch: pytest.MonkeyPatch) -> type[Thread]:
    from vllm_cacheslide import backend

    class Fresh(Thread):
        answers: dict[str, Exception] = {}  # noqa: RUF012
        made: list[Thread] = []  # noqa: RUF012

    monkeypatch.setattr(backend, "EngineThread", Fresh)
    monkeypatch.setattr(backend, "engine_args", lambda *_: None)
    return Fresh


def test_a_backend_that_cannot_be_made_ends_its_engine(thread: type[Thread]) -> None:
    from vllm_cacheslide.backend import VllmBackend

    thread.answers["tokenizer"] = ValueError("no tokenizer")
    with pytest.raises(ValueError, match="no tokenizer"):
        VllmBackend("model")
    assert [each.closed for each in thread.made] == [1]


def test_an_engine_that_does_not_start_is_one_error_that_names_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm_cacheslide import backend

    def fails(_: Any) -> None:
        raise RuntimeError("less memory than desired")

    monkeypatch.setattr(backend, "engine_args", lambda *_: None)
    monkeypatch.setattr("vllm_cacheslide.backend.LLMEngine.from_engine_args", fails)
    with pytest.raises(BackendError, match=r"engine for some/tiny did not start: less memory than"):
        backend.VllmBackend("some/tiny")


@pytest.mark.parametrize(
    ("error", "logged"), [(BackendError("closed"), False), (RuntimeError("disk full"), True)]
)
def test_what_was_not_written_at_the_end_is_logged(
    thread: type[Thread], monkeypatch: pytest.MonkeyPatch, error: Exception, logged: bool
) -> None:
    from vllm_cacheslide import backend, guard

    told: list[str] = []
    monkeypatch.setattr(guard.log, "warning", lambda text, **_: told.append(text))
    made = backend.VllmBackend("model")
    thread.answers["cacheslide_flush"] = error
    made.close()
    assert [each.closed for each in thread.made] == [1]
    assert told == ["CacheSlide: the last contexts may not be on SSD"] * logged


def test_the_backend_takes_every_setting_but_what_only_a_server_reads(
    thread: type[Thread], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_cacheslide import backend

    given: dict[str, Any] = {}
    monkeypatch.setattr(backend, "engine_args", lambda _, extra, __: given.update(extra))
    backend.VllmBackend("model", tenant_quota_bytes=7, namespace_quota_bytes=5)
    settings = Settings.of(given)
    assert (settings.tenant_quota_bytes, settings.namespace_quota_bytes) == (7, 5)
    named = {field.name for field in fields(Settings)}
    assert named - given.keys() == {"receipts", "policy", "tenant_header"}


@dataclass(frozen=True)
class Finder:
    """An entry point that finds models; `found` is a folder or what is raised instead."""

    found: Path | Exception
    missing: str = ""
    value: str = "other:finder"

    def load(self) -> Callable[[str], Path]:
        if self.missing:
            raise ImportError(self.missing)
        return self._find

    def _find(self, model: str) -> Path:
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


def located_by(monkeypatch: pytest.MonkeyPatch, *finders: Finder) -> Path | str:
    from vllm_cacheslide import launch

    monkeypatch.setattr(launch, "entry_points", lambda group: finders)
    return launch.located("some/tiny")


def test_all_who_find_models_are_asked_and_the_first_to_know_it_wins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unknown = [Finder(ModelNotFoundError(f"{name} has none")) for name in ("first", "second")]
    known = [Finder(Path(name)) for name in ("third", "fourth")]
    assert located_by(monkeypatch, *unknown, *known) == Path("third")
    assert located_by(monkeypatch) == "some/tiny"
    with pytest.raises(ModelNotFoundError, match="first has none"):
        located_by(monkeypatch, *unknown)


def test_one_who_finds_models_but_lacks_a_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    lame = Finder(Path("never"), missing="No module named 'gguf'")
    expected = r"other:finder, which finds models, needs a package .*'gguf'\); install it"
    with pytest.raises(BackendError, match=expected):
        located_by(monkeypatch, lame)


class Attached:
    """A connector's worker side on one of two ranks, `mine` what it fails with itself."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, mine: Exception | None, other: str) -> None:
        from vllm_cacheslide import connector

        self.asked: list[list[str]] = []
        self.closed: list[bool] = []

        def assemble(*_: Any) -> Any:
            if mine is not None:
                raise mine
            return SimpleNamespace(store=SimpleNamespace(close=lambda: self.closed.append(True)))

        def agreed(troubles: list[str]) -> list[str]:
            self.asked.append(troubles)
            return [troubles[0] or other]

        monkeypatch.setattr(connector, "assemble", assemble)
        monkeypatch.setattr(connector, "agreed", agreed)
        self.side: Any = connector.CacheSlideConnector.__new__(connector.CacheSlideConnector)
        self.side.off, self.side.working, self.side.settings = "", None, Settings()
        self.side._vllm_config = self.side._kv_cache_config = None

    def attach(self) -> None:
        self.side.attach_model(torch.nn.Identity())


def test_a_rank_that_is_off_turns_off_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """And lets go of its store; else it would wait for the other in its first reduction."""
    for mine, other, reason in (
        (None, "UnsupportedModelError: elsewhere", "UnsupportedModelError: elsewhere"),
        (UnsupportedModelError("here"), "", "UnsupportedModelError: here"),
    ):
        attached = Attached(monkeypatch, mine, other)
        attached.attach()
        assert (attached.side.off, attached.side.working) == (reason, None)
        assert attached.closed == [True] * (mine is None)
        assert len(attached.asked) == 1


def test_a_rank_without_its_folder_tells_the_others_before_it_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attached = Attached(monkeypatch, StoreError("is being written"), "")
    with pytest.raises(StoreError, match="is being written"):
        attached.attach()
    assert attached.asked == [["StoreError: is being written"]]


def test_ranks_that_can_all_reuse_do(monkeypatch: pytest.MonkeyPatch) -> None:
    attached = Attached(monkeypatch, None, "")
    attached.attach()
    assert (attached.side.off, attached.closed) == ("", [])
    assert attached.side.working is not None


def test_the_first_trouble_of_any_rank_is_everybodys(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_cacheslide import agreement

    def gather(told: list[Any], mine: list[str], group: object) -> None:
        told[:] = [mine, ["theirs", "theirs", ""]]

    group = SimpleNamespace(world_size=2, cpu_group=None)
    monkeypatch.setattr(agreement, "get_tp_group", lambda: group)
    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    assert agreement.agreed(["mine", "", ""]) == ["mine", "theirs", ""]
    group.world_size = 1
    assert agreement.agreed(["mine", ""]) == ["mine", ""]


@pytest.mark.parametrize(
    ("depth", "needs_ssd", "kind"),
    [
        (0, True, "InlineLoader"),
        (2, False, "AheadLoader"),
        (None, True, "AheadLoader"),
        (None, False, "InlineLoader"),
    ],
)
def test_layers_are_loaded_ahead_as_asked_for_or_where_it_gains(
    depth: int | None, needs_ssd: bool, kind: str
) -> None:
    made = loader_of(depth, needs_ssd=needs_ssd)
    assert type(made).__name__ == kind
    assert getattr(made, "_depth", 0) == (2 if depth else 4 if kind == "AheadLoader" else 0)


@pytest.mark.parametrize("depth", [2, None])
def test_nothing_to_load_starts_no_thread(depth: int | None) -> None:
    assert type(loader_of(depth, needs_ssd=True, pieces=False)).__name__ == "InlineLoader"


def loader_of(depth: int | None, *, needs_ssd: bool, pieces: bool = True) -> Any:
    """What a pass over three layers loads with."""
    from vllm_cacheslide.passes import LayerPass
    from vllm_cacheslide.rows import Job

    class Load:
        def __init__(self) -> None:
            self.needs_ssd = needs_ssd

        def __bool__(self) -> bool:
            return pieces

        def place(self, layer: int) -> None:
            pass

    unused: Any = None
    paged: Any = SimpleNamespace(device=torch.device("cpu"))
    job: Any = Job("engine", "request", unused, (), np.arange(0))
    load: Any = Load()
    with LayerPass(unused, paged, unused, depth)._loading(range(3), {job: load}) as loader:
        return loader
