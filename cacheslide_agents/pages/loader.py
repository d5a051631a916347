"""Fills the slots of coming layers while a layer computes.

In: `fill(layer)`, which reads one layer from a page store and writes it into the working slots.
Out: layers that are ready, or the error that `fill` raised; seconds loaded and seconds waited.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from threading import Condition, Thread
from time import perf_counter
from typing import Protocol

import torch

Fill = Callable[[int], None]

DEPTH = 4
"""Layers that a loader is ahead, where nothing else is asked for."""


class Loader(Protocol):
    """Brings the layers of one request into their slots, in order; use once.

    `load_s`: seconds spent in `fill`. `wait_s`: seconds that computation stood still for it (on
    CUDA without the time in which only the device's own stream waits).
    """

    @property
    def load_s(self) -> float: ...
    @property
    def wait_s(self) -> float: ...

    def enter(self, layer: int) -> None:
        """Computation of `layer` begins."""
        ...

    def ready(self, layer: int) -> bool:
        """Whether `wait` would return at once."""
        ...

    def wait(self, layer: int) -> None:
        """Return when `layer` is in its slots; raises what `fill` raised."""
        ...

    def close(self) -> None:
        """Once this returns, nothing is written any more; safe to call twice."""
        ...


class InlineLoader:
    """Fills each layer when its computation begins, in the same thread: nothing overlaps."""

    def __init__(self, fill: Fill) -> None:
        self._fill = fill
        self.load_s = 0.0
        self._filled = -1

    @property
    def wait_s(self) -> float:
        return self.load_s

    def enter(self, layer: int) -> None:
        started = perf_counter()
        self._fill(layer)
        self.load_s += perf_counter() - started
        self._filled = layer

    def ready(self, layer: int) -> bool:
        return layer <= self._filled

    def wait(self, layer: int) -> None:
        assert self.ready(layer)

    def close(self) -> None:
        """Nothing runs between calls."""


class AheadLoader:
    """Fills layers in a thread of its own, at most `depth` layers ahead of computation.

    On a CUDA `device` copies run in a stream of their own, for which computation's stream waits.
    """

    def __init__(
        self, fill: Fill, layers: int, depth: int, device: torch.device | None = None
    ) -> None:
        self._fill, self._depth, self._device = fill, depth, device
        self._stream = torch.cuda.Stream(device) if device else None  # type: ignore[no-untyped-call]
        self.load_s = self.wait_s = 0.0
        self._state = Condition()
        self._filled, self._entered, self._last = -1, 0, layers - 1
        self._error: Exception | None = None
        self._closed = False
        self._copied: list[torch.cuda.Event] = []
        if self._stream is not None:  # the slots may still be read by what ran before
            self._stream.wait_stream(torch.cuda.current_stream(device))
        self._thread = Thread(target=self._run, name="cacheslide-loader", daemon=True)
        self._thread.start()

    def enter(self, layer: int) -> None:
        with self._state:
            self._entered = layer
            self._state.notify_all()

    def ready(self, layer: int) -> bool:
        return layer <= self._filled or self._error is not None

    def wait(self, layer: int) -> None:
        started = perf_counter()
        with self._state:
            self._state.wait_for(lambda: self.ready(layer))
        self.wait_s += perf_counter() - started
        if layer > self._filled and self._error is not None:
            raise self._error
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied[layer])

    def close(self) -> None:
        with self._state:
            self._closed = True
            self._state.notify_all()
        self._thread.join()
        if self._stream is not None:
            self._stream.synchronize()

    def _run(self) -> None:
        context = nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
        with context, torch.inference_mode():  # both hold for one thread only
            for layer in range(self._last + 1):
                if not self._may_fill(layer) or not self._filled_one(layer):
                    return

    def _may_fill(self, layer: int) -> bool:
        """Wait until computation is near enough; false when nobody needs the layer any more."""
        with self._state:
            self._state.wait_for(lambda: self._closed or layer <= self._entered + self._depth)
            return not self._closed

    def _filled_one(self, layer: int) -> bool:
        started = perf_counter()
        error: Exception | None = None
        try:
            self._fill(layer)
            if self._stream is not None:
                self._copied.append(self._stream.record_event())
        except Exception as caught:  # whoever waits for the layer raises it
            error = caught
        self.load_s += perf_counter() - started
        with self._state:
            self._error = error
            self._filled = layer if error is None else self._filled
            self._state.notify_all()
        return error is None


def loader_for(
    fill: Fill, layers: int, depth: int | None, device: torch.device, gains: Callable[[], bool]
) -> Loader:
    """One that is `depth` layers ahead, 0 for none; `None`: `DEPTH` where that `gains` something,
    as it always does with slots on CUDA.
    """
    on_cuda = device.type == "cuda"
    if depth is None:
        depth = DEPTH if on_cuda or gains() else 0
    if not depth:
        return InlineLoader(fill)
    return AheadLoader(fill, layers, depth, device if on_cuda else None)
