"""Selectors that go by place: the prompt's tail, and what follows removed text."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cacheslide_agents.chunks import Alignment, Run
from cacheslide_agents.errors import RequestError
from cacheslide_agents.selection import AfterRemoval, SelectionView, Selector, Tail


def view(length: int, cached_length: int, *runs: Run) -> SelectionView:
    def no_keys(layer: int) -> torch.Tensor:
        raise AssertionError(f"asked for keys of layer {layer}")

    alignment = Alignment(length, cached_length, runs)
    ids = np.arange(length, dtype=np.int64)
    cached = np.arange(cached_length, dtype=np.int64)
    return SelectionView(ids, cached, runs, alignment.edits(), no_keys, no_keys, no_keys)


# head 0-39 | 100 old tokens became 10 | 150 kept | 30 inserted | 40 kept | 5 new
TURN = view(275, 330, Run(0, 0, 40), Run(50, 140, 150), Run(230, 290, 40))


def test_the_tail_is_what_is_reused_of_the_last_tokens() -> None:
    assert Tail(20).select(TURN).tolist() == list(range(255, 270))
    assert Tail(64).select(TURN).tolist() == list(range(230, 270))


def test_the_tail_never_reaches_before_the_first_change() -> None:
    assert Tail(1000).select(TURN).tolist() == [*range(50, 200), *range(230, 270)]


def test_only_edits_that_shortened_the_prompt_are_followed() -> None:
    assert AfterRemoval(64).select(TURN).tolist() == list(range(50, 114))


def test_no_more_tokens_follow_a_removal_than_it_took_away() -> None:
    shorter = view(100, 110, Run(0, 0, 40), Run(40, 50, 60))
    assert AfterRemoval(64).select(shorter).tolist() == list(range(40, 50))


@pytest.mark.parametrize("selector", [Tail(0), AfterRemoval(0)], ids=["tail", "removal"])
def test_a_budget_of_zero_selects_nothing(selector: Selector) -> None:
    assert selector.select(TURN).tolist() == []


@pytest.mark.parametrize("make", [Tail, AfterRemoval])
def test_a_negative_budget_is_refused(make: type[Tail | AfterRemoval]) -> None:
    with pytest.raises(RequestError, match="-1"):
        make(-1)
