"""A backend whose contexts outlive it: options, restarts in other processes, who closes what."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from cacheslide_agents.backend import GenerationRequest, Receipt, Sampling
from cacheslide_agents.errors import RequestError, StoreError
from cacheslide_agents.pages import ContextKey, MemoryStore
from cacheslide_agents.policies import CacheSlide, Prefix, Recompute
from langchain_cacheslide import ChatCacheSlide
from torch_cacheslide import TorchBackend

POLICY = CacheSlide(may_decline=False)
HEAD, TAIL = (np.random.default_rng(seed).integers(3, 250, 90).tolist() for seed in (1, 2))
OTHER_PROCESS = """
import sys
from cacheslide_agents.backend import GenerationRequest, load_backend
backend = load_backend("torch", model=sys.argv[1], device="cpu", store_path=sys.argv[2])
ids = [int(word) for word in sys.argv[3].split()]
list(backend.generate(GenerationRequest(ids, session="agent")))
"""  # never closed: a script that ends does that


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, support: Callable[[str], ModuleType]) -> str:
    return str(
        support("tiny_models").write_model(
            tmp_path_factory.mktemp("tiny"),
            num_hidden_layers=3,
            max_position_embeddings=1024,
            initializer_range=0.3,
        )
    )


def opened(folder: str, **options: Any) -> TorchBackend:
    return TorchBackend(folder, device="cpu", **options)


def ask(backend: TorchBackend, turn: int, **request: Any) -> tuple[list[int], Receipt]:
    middle = np.random.default_rng(100 + turn).integers(3, 250, 9).tolist()
    sampling = Sampling(max_tokens=8)
    request = {"session": "agent", "policy": POLICY, "sampling": sampling, **request}
    chunks = list(backend.generate(GenerationRequest([*HEAD, *middle, *TAIL], **request)))
    assert chunks[-1].receipt is not None
    return [token for chunk in chunks for token in chunk.token_ids], chunks[-1].receipt


def test_another_process_finds_the_contexts_of_one_that_ended(folder: str, tmp_path: Path) -> None:
    ids = " ".join(map(str, [*HEAD, 7, *TAIL]))
    subprocess.run(
        [sys.executable, "-c", OTHER_PROCESS, folder, str(tmp_path / "store"), ids],
        check=True,
        timeout=240,
    )
    backend = opened(folder, store_path=tmp_path / "store")
    _, receipt = ask(backend, 0, policy=Prefix())
    assert receipt.reused_tokens == len(HEAD)
    assert backend.metrics()["ssd_read_bytes"] > 0
    backend.close()


def test_what_is_found_again_answers_as_what_never_left(folder: str, tmp_path: Path) -> None:
    stays, answers = opened(folder), []
    for turn in range(4):
        backend = opened(folder, store_path=tmp_path)
        answers.append((ask(stays, turn)[0], ask(backend, turn)[0]))
        backend.close()
    stays.close()
    assert [here for here, _ in answers] == [there for _, there in answers]


def test_another_model_finds_nothing_in_the_same_folder(
    folder: str, tmp_path: Path, support: Callable[[str], ModuleType]
) -> None:
    backend = opened(folder, store_path=tmp_path / "store")
    ask(backend, 0)
    backend.close()
    other = support("tiny_models").write_model(
        tmp_path / "other", seed=5, num_hidden_layers=3, max_position_embeddings=1024
    )
    backend = opened(str(other), store_path=tmp_path / "store")
    assert ask(backend, 1)[1].outcome == "cold"
    backend.close()


def test_a_backend_that_is_let_go_of_unclosed_saves_and_unlocks(
    folder: str, tmp_path: Path
) -> None:
    backend = opened(folder, store_path=tmp_path)
    ask(backend, 0)
    with pytest.raises(StoreError, match="is being written by process"):
        opened(folder, store_path=tmp_path)
    del backend
    gc.collect()
    again = opened(folder, store_path=tmp_path)
    assert len(again.store.find(ContextKey(again.fingerprint, "default", "default"))) == 1
    again.close()


def test_a_store_that_was_given_is_not_closed(folder: str, tmp_path: Path) -> None:
    store = MemoryStore(1 << 26)
    with pytest.raises(RequestError, match="a store was given; give one of the two"):
        opened(folder, store=store, store_path=tmp_path)
    backend = opened(folder, store=store)
    ask(backend, 0)
    backend.close()
    again = opened(folder, store=store)
    assert ask(again, 1)[1].reused_tokens > 0
    again.close()


def test_with_one_byte_for_everything_requests_are_answered(folder: str, tmp_path: Path) -> None:
    backend = opened(folder, store_path=tmp_path, store_bytes=1, disk_bytes=1)
    got = [ask(backend, turn) for turn in range(2)]
    for turn, (tokens, receipt) in enumerate(got):
        assert receipt.outcome == "cold"
        assert tokens == ask(backend, turn, policy=Recompute())[0]
    backend.close()


def test_the_chat_model_takes_the_path_as_a_backend_option(folder: str, tmp_path: Path) -> None:
    for outcome in ("cold", "hit"):
        options = {"device": "cpu", "store_path": str(tmp_path)}
        model = ChatCacheSlide(model=folder, backend_options=options, max_tokens=4)
        told = model.invoke("Name the colour of the sky, and of the sea. " * 4)
        assert told.response_metadata["cacheslide"]["outcome"] == outcome, json.dumps(
            told.response_metadata, default=str
        )
        model.loader.close()


def test_a_session_is_pinned_in_the_namespace_that_is_named(folder: str) -> None:
    kept = []
    for namespace in ("tenant", "default"):
        backend = opened(folder, store_bytes=15 * 16 * 384)  # one prompt of 189 tokens
        backend.pin("agent", namespace)
        ask(backend, 0, namespace="tenant")
        ask(backend, 1, namespace="rival", session="rival")
        kept.append(ask(backend, 2, namespace="tenant", session=None)[1].reused_tokens > 0)
        backend.close()
    assert kept == [True, False]


def test_a_folder_of_nobody_is_refused_by_name(tiny_model: str) -> None:
    with pytest.raises(RequestError, match=r"store_path='~nobody-here/x' is no path"):
        TorchBackend(tiny_model, device="cpu", store_path="~nobody-here/x")
