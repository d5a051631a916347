"""ChatCacheSlide: when the backend is loaded, who shares it, and what an import pulls in."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from types import ModuleType
from typing import Any

import pytest
from langchain_core.runnables import ConfigurableField

from cacheslide_agents.backend import Backend
from cacheslide_agents.errors import BackendError
from langchain_cacheslide import BackendLoader, ChatCacheSlide


@pytest.fixture
def loaded(
    monkeypatch: pytest.MonkeyPatch, support: Callable[[str], ModuleType]
) -> list[tuple[str, dict[str, Any]]]:
    """What `load_backend` was called with; it waits a moment, as loading weights does."""
    calls: list[tuple[str, dict[str, Any]]] = []

    def load(name: str, **options: Any) -> Backend:
        calls.append((name, options))
        Event().wait(0.05)
        fake: Backend = support("fake_backend").FakeBackend(model_id=options.get("model", "any"))
        return fake

    monkeypatch.setattr("langchain_cacheslide.loader.load_backend", load)
    return calls


def test_backend_is_loaded_by_the_first_call_and_once_for_all_threads(
    loaded: list[tuple[str, dict[str, Any]]],
) -> None:
    chat = ChatCacheSlide(model="m", backend="torch", backend_options={"device": "cpu"})
    assert loaded == []
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(chat.invoke, [f"word{i}" for i in range(16)]))
    assert [answer.content for answer in answers] == [f"word{i}" for i in range(16)]
    assert loaded == [("torch", {"model": "m", "device": "cpu"})]


def test_model_left_out_is_left_to_the_backend(
    loaded: list[tuple[str, dict[str, Any]]],
) -> None:
    ChatCacheSlide().load()
    assert loaded == [("torch", {})]


def test_copies_of_a_model_share_its_backend_unless_they_name_another(
    loaded: list[tuple[str, dict[str, Any]]],
) -> None:
    chat = ChatCacheSlide(model="m")
    configurable = chat.configurable_fields(temperature=ConfigurableField(id="t"))
    configurable.with_config(configurable={"t": 0.5}).invoke("Hi")
    first = chat.load()
    assert chat.model_copy(update={"seed": 2}).load() is first
    assert copy.deepcopy(chat).load() is first
    assert ChatCacheSlide(model="m", reuse=False, loader=chat.loader).load() is first
    assert len(loaded) == 1
    assert chat.model_copy(update={"model": "other"}).load().model_id == "other"
    assert pickle.loads(pickle.dumps(chat)).load().model_id == "m"
    assert len(loaded) == 3


def test_closed_loader_closes_its_backends_and_loads_anew(
    loaded: list[tuple[str, dict[str, Any]]],
) -> None:
    loader = BackendLoader()
    first: Any = loader.get("torch", "m", {})
    encoder = loader.encoder(first.tokenizer)
    assert loader.encoder(first.tokenizer) is encoder
    loader.close()
    assert first.closed
    assert loader.encoder(first.tokenizer) is not encoder, "a closed model's tokenizer is let go"
    assert loader.get("torch", "m", {}) is not first


def test_a_model_that_loads_keeps_nobody_waiting_who_wants_another(
    monkeypatch: pytest.MonkeyPatch, support: Callable[[str], ModuleType]
) -> None:
    begun, go_on = Event(), Event()

    def load(name: str, *, model: str) -> Backend:
        if model == "slow":
            begun.set()
            assert go_on.wait(20)
        fake: Backend = support("fake_backend").FakeBackend(model_id=model)
        return fake

    monkeypatch.setattr("langchain_cacheslide.loader.load_backend", load)
    loader = BackendLoader()
    with ThreadPoolExecutor(3) as pool:
        slow = [pool.submit(loader.get, "torch", "slow", {}) for _ in range(2)]
        assert begun.wait(20)
        quick = pool.submit(loader.get, "torch", "quick", {})
        try:
            assert quick.result(10).model_id == "quick"
            assert pool.submit(loader.encoder, quick.result().tokenizer).result(10)
            assert not any(each.done() for each in slow)
        finally:
            go_on.set()
    assert slow[0].result() is slow[1].result()


def test_load_that_failed_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[str] = []

    def load(name: str, **options: Any) -> Any:
        tries.append(name)
        if len(tries) == 1:
            raise BackendError("no memory")
        return tries

    monkeypatch.setattr("langchain_cacheslide.loader.load_backend", load)
    loader = BackendLoader()
    with pytest.raises(BackendError, match="no memory"):
        loader.get("torch", None, {})
    loaded: Any = loader.get("torch", None, {})
    assert loaded is tries and len(tries) == 2


def test_import_needs_neither_torch_nor_vllm() -> None:
    code = """
import sys
class Wall:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "vllm", "torch_cacheslide", "vllm_cacheslide"}:
            raise ImportError(f"{name} must not be imported")
sys.meta_path.insert(0, Wall())
import langchain_cacheslide
chat = langchain_cacheslide.ChatCacheSlide()
langchain_cacheslide.TemplateRunnable.named("reflexion") | chat
assert "torch" not in sys.modules and "vllm" not in sys.modules
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)
