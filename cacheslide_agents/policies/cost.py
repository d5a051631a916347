"""What a prefill will cost, so that the planner can choose the cheaper way.

In: the work of a prefill (rows, query-key pairs, tokens loaded) and, as they happen, seconds that
such work took. Out: predicted seconds. Before anything was observed the prediction is in nominal
seconds, made of floating-point operations: only ratios of predictions mean something then.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from threading import Lock
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from cacheslide_agents.errors import RequestError
from cacheslide_agents.policies.fit import fit_seconds
from cacheslide_agents.policies.work import Work

Floats = npt.NDArray[np.float64]

_NOMINAL_FLOPS_PER_S = 1e11
_FLOPS_PER_BYTE = 10.0
"""Operations a machine does while it copies and rotates one cached byte; a prior, soon observed."""
_PASS_ROWS, _REUSE_ROWS = 8.0, 4.0
"""Fixed prices as so many rows through the model: of any prefill, and of selecting on top of it."""
_REMEMBERED = 128
"""The newest observations, which the fit looks at."""
_FIT_EVERY = 8
"""A fit is due when one in so many remembered observations is new."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """The sizes of a decoder that say what a row, a pair and a cached token weigh."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    kv_bytes: int = 4

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) < 1:
                raise RequestError(f"geometry {name}={getattr(self, name)!r} must be at least 1")

    @classmethod
    def from_config(cls, config: Any) -> Self:
        """Read a transformers decoder config by its field names."""
        heads = int(config.num_attention_heads)
        return cls(
            layers=int(config.num_hidden_layers),
            hidden=int(config.hidden_size),
            intermediate=int(getattr(config, "intermediate_size", None) or 4 * config.hidden_size),
            heads=heads,
            kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
            head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
        )

    def nominal(self) -> Floats:
        """Nominal seconds per entry of `Work.vector()`."""
        attention = 2 * self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        row = attention + 6 * self.hidden * self.intermediate
        model_row = row * self.layers
        pair = 4 * self.heads * self.head_dim
        loaded = _FLOPS_PER_BYTE * 2 * self.kv_heads * self.head_dim * self.kv_bytes
        flops = [_PASS_ROWS * model_row, row, pair, loaded, _REUSE_ROWS * model_row]
        return np.array(flops) / _NOMINAL_FLOPS_PER_S


class CostModel:
    """Seconds of a prefill: a non-negative linear model of its `Work`, refined by what is observed.

    The prior is the geometry's operation counts at one common speed; observations first set the
    speed (a median, so outliers do not), then bend the single prices. Safe to share among threads.
    """

    def __init__(self, geometry: Geometry) -> None:
        self.layers = geometry.layers
        self._nominal = geometry.nominal()
        self._prices = self._nominal
        self._seen: deque[tuple[Floats, float]] = deque(maxlen=_REMEMBERED)
        self._unfitted = 0
        self._lock = Lock()

    @classmethod
    def from_geometry(cls, **sizes: int) -> Self:
        """`layers`, `hidden`, `intermediate`, `heads`, `kv_heads`, `head_dim`, `kv_bytes`."""
        return cls(Geometry(**sizes))

    @classmethod
    def from_config(cls, config: Any) -> Self:
        return cls(Geometry.from_config(config))

    def predict(self, work: Work) -> float:
        """Seconds `work` will take; nominal before the first observation."""
        return float(self._prices @ work.vector())

    def observe(self, work: Work, seconds: float) -> None:
        """Learn that `work` took `seconds`; a time that is not finite and positive is ignored.

        Fits when an eighth of what is remembered is new: a millisecond, now and then.
        """
        if not 0.0 < seconds < float("inf"):
            return
        with self._lock:
            self._seen.append((work.vector(), seconds))
            self._unfitted += 1
            if _FIT_EVERY * self._unfitted < len(self._seen):
                return
            self._unfitted = 0
            features = np.array([vector for vector, _ in self._seen])
            taken = np.array([each for _, each in self._seen])
            self._prices = fit_seconds(features, taken, self._nominal)
