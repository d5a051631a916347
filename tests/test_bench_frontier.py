"""The oracle finds the tokens that a change really altered; the plot shows every variant."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from cacheslide_agents.backend import GenerationRequest
from cacheslide_agents.bench import plot_frontier, plots
from cacheslide_agents.bench.measure import Bench
from cacheslide_agents.bench.studies.oracle import KeepsContexts, deviating_positions
from cacheslide_agents.bench.studies.variants import FAMILIES, oracle
from cacheslide_agents.bench.workloads import Turn
from cacheslide_agents.chunks import Chunk, ChunkedPrompt, Message
from cacheslide_agents.errors import BackendError, DataError
from cacheslide_agents.pages.base import ContextKey, LayerKV, StoredContext
from cacheslide_agents.pages.store import MemoryStore
from cacheslide_agents.policies import CacheSlide, Prefix
from cacheslide_agents.selection import Fixed

if TYPE_CHECKING:
    from tests.support.scripted_backend import ScriptedBackend

HEAD, TAIL, LAYERS = "the head of the prompt ", " and a tail that both have in common", 3
OLD, NEW = HEAD + "red" + TAIL, HEAD + "violet" + TAIL


def prompt(text: str) -> ChunkedPrompt:
    return ChunkedPrompt((Message("user", (Chunk("all", text),)),), "t")


def layers(text: str, altered: dict[int, float]) -> list[LayerKV]:
    """Keys of ones and values of twos [2, tokens, 4]; `altered` adds to layer 1 at a position."""
    keys, values = torch.ones(2, len(text), 4), torch.full((2, len(text), 4), 2.0)
    found = [(keys.clone(), values.clone()) for _ in range(LAYERS)]
    for position, amount in altered.items():
        found[1][0][:, position] += amount
    return found


@pytest.fixture
def backend(support: Callable[[str], ModuleType]) -> ScriptedBackend:
    """Keeps contexts; a dense run of the new prompt differs at three tokens of the tail."""
    scripted = support("scripted_backend")
    start = len(HEAD) + len("violet")

    class Keeper(scripted.ScriptedBackend):  # type: ignore[misc, name-defined]
        fingerprint = "print"
        layers = LAYERS

        def __init__(self) -> None:
            super().__init__()
            self.store = MemoryStore(1 << 20)

        def warm(self, request: GenerationRequest) -> None:
            text = "".join(map(chr, request.prompt_ids))
            altered = {start + 4: 0.5, start + 9: 3.0, start: 1.0} if text == NEW else {}
            ids = np.asarray(request.prompt_ids, dtype=np.int64)
            key = ContextKey("print", request.namespace, request.task)
            exact = np.ones(len(ids), dtype=np.bool_)
            self.store.put(StoredContext(key, ids, exact), layers(text, altered))

    made: ScriptedBackend = Keeper()
    return made


def populated(backend: ScriptedBackend) -> Any:
    turn = Turn("row", 1, "t", prompt(OLD), prompt(NEW))
    return Bench(backend, backend.encode).populate(turn, {"prefix": Prefix()})


def test_the_oracle_ranks_reused_tokens_by_their_true_deviation(backend: ScriptedBackend) -> None:
    assert isinstance(backend, KeepsContexts)
    ranked = deviating_positions(backend, populated(backend))
    start = len(HEAD) + len("violet")
    assert ranked[:3].tolist() == [start + 9, start, start + 4]
    assert sorted(ranked) == list(range(start, len(NEW) - 1))  # reused, after the change, not last
    assert ranked[3:].tolist() == sorted(ranked[3:])


def test_the_oracles_variants_recompute_their_share_of_the_reused_tokens(
    backend: ScriptedBackend,
) -> None:
    candidates = len(TAIL) - 1
    chosen = {one.fraction: one.policy.selector for one in oracle(backend, populated(backend))}
    for fraction, selector in chosen.items():
        assert isinstance(selector, Fixed)
        assert fraction is not None
        assert len(selector.indices) == round(fraction * candidates)


def test_a_context_that_the_store_let_go_is_an_error(backend: ScriptedBackend) -> None:
    turn = populated(backend)
    backend.store.clear()  # type: ignore[attr-defined]
    with pytest.raises(BackendError, match="raise its byte budget"):
        deviating_positions(backend, turn)


def test_every_variant_has_a_label_of_its_own_and_never_declines() -> None:
    variants = [one for family in FAMILIES.values() for one in family()]
    assert len({one.label for one in variants}) == len(variants)
    assert not any(one.policy.may_decline for one in variants)


def test_what_users_get_is_one_of_them() -> None:
    variants = list(FAMILIES["default"]())
    assert CacheSlide().selector in [one.policy.selector for one in variants]
    assert {f"{one.policy.name} {one.selector}" for one in variants} == {plots._DEFAULT}


def test_the_plot_has_a_panel_a_task_and_a_line_a_selector(tmp_path: Path) -> None:
    points = [
        {"task": task, "policy": policy, "selector": selector, "fraction": fraction}
        | {"compute_fraction": x, "kl_mean": y}
        for task in ("reflexion", "memgpt")
        for policy, selector, fraction in (("p", "near", 0.1), ("p", "far", 0.1), ("q", "b8", None))
        for x, y in ((0.2, 0.01), (0.1, 0.0))
    ]
    path = tmp_path / "frontier.svg"
    plot_frontier({"points": points}, path)
    drawn = path.read_text(encoding="utf-8")
    assert drawn.startswith("<?xml")
    for text in ("reflexion", "memgpt", "p near", "p far", "q", "compute fraction"):
        assert f"<!-- {text} -->" in drawn


def test_a_study_without_points_cannot_be_plotted(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="needs a study with 'points'"):
        plot_frontier({"study": "drift"}, tmp_path / "x.svg")
