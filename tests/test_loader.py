"""Loaders on their own: order, depth, errors, and the end of all writing."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event

import pytest
import torch

from cacheslide_agents.errors import PageError
from cacheslide_agents.pages.loader import DEPTH, AheadLoader, InlineLoader, Loader, loader_for

LAYERS = 6
Make = Callable[[Callable[[int], None]], Loader]
LOADERS: dict[str, Make] = {
    "inline": InlineLoader,
    "ahead": lambda fill: AheadLoader(fill, LAYERS, depth=2),
}


@pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS)
def test_layers_are_filled_in_order_and_each_before_its_wait_ends(make: Make) -> None:
    filled: list[int] = []
    loader = make(filled.append)
    for layer in range(LAYERS):
        loader.enter(layer)
        loader.wait(layer)
        assert filled[: layer + 1] == list(range(layer + 1))
        assert loader.ready(layer)
    loader.close()
    assert filled == list(range(LAYERS))
    assert loader.load_s > 0.0 and loader.wait_s > 0.0


@pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS)
def test_what_the_fill_raises_reaches_who_waits_for_that_layer(make: Make) -> None:
    def fill(layer: int) -> None:
        if layer == 2:
            raise PageError("layer 2 is torn")

    loader = make(fill)
    for layer in range(2):
        loader.enter(layer)
        loader.wait(layer)
    with pytest.raises(PageError, match="layer 2 is torn"):
        loader.enter(2)
        loader.wait(2)
    loader.close()


def test_a_loader_is_never_more_than_its_depth_ahead() -> None:
    entered = 0
    ahead: list[int] = []

    def fill(layer: int) -> None:
        ahead.append(layer - entered)

    loader = AheadLoader(fill, LAYERS, depth=2)
    for entered in range(LAYERS):
        loader.enter(entered)
        loader.wait(min(entered + 2, LAYERS - 1))
    loader.close()
    assert max(ahead) == 2
    assert len(ahead) == LAYERS


def test_layers_within_the_depth_are_loaded_before_computation_comes_to_them() -> None:
    reached = Event()
    loader = AheadLoader(lambda layer: reached.set() if layer == 3 else None, LAYERS, depth=3)
    assert reached.wait(30)
    loader.close()


def test_nothing_is_filled_once_a_loader_is_closed() -> None:
    filled: list[int] = []
    loader = AheadLoader(filled.append, LAYERS, depth=0)
    loader.wait(0)
    loader.close()
    loader.close()
    loader.enter(LAYERS - 1)
    assert filled == [0]


@pytest.mark.parametrize(
    ("depth", "gains", "most_ahead"),
    [(0, True, None), (2, False, 2), (None, True, DEPTH), (None, False, None)],
)
def test_a_loader_is_ahead_as_asked_or_where_that_gains_something(
    depth: int | None, gains: bool, most_ahead: int | None
) -> None:
    filled: list[int] = []
    loader = loader_for(filled.append, LAYERS, depth, torch.device("cpu"), lambda: gains)
    if most_ahead is None:
        assert isinstance(loader, InlineLoader)
    else:
        loader.wait(most_ahead)  # layer 0 is entered
        assert filled == list(range(most_ahead + 1))
    loader.close()
