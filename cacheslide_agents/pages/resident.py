"""One context that lies in memory.

In: a stored context with its tensors. Out: the same without slack memory, and what it weighs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from cacheslide_agents.errors import PageError
from cacheslide_agents.pages.base import PAGE_TOKENS, ContextKey, LayerKV, StoredContext

Content = tuple[ContextKey, bool, bytes]
"""What makes two contexts copies of each other: key, isolated or not, token ids."""


@dataclass(eq=False)
class Resident:
    """A context in memory. `used` is when it was last stored or loaded, on the store's clock."""

    context: StoredContext
    layers: tuple[LayerKV, ...]
    residuals: Mapping[int, Tensor]
    content: Content
    nbytes: int
    used: int = 0

    @property
    def pages(self) -> int:
        """Pages of `PAGE_TOKENS` tokens of one layer; the last of a layer may be partly filled."""
        return len(self.layers) * -(-len(self.context) // PAGE_TOKENS)


def content_of(key: ContextKey, isolated: bool, ids: npt.NDArray[np.int64]) -> Content:
    return (key, isolated, np.asarray(ids, dtype=np.int64).tobytes())


def tensor_bytes(layers: Sequence[LayerKV], residuals: Mapping[int, Tensor]) -> int:
    return sum(tensor.nbytes for pair in layers for tensor in pair) + sum(
        tensor.nbytes for tensor in residuals.values()
    )


def check_tensors(
    context: StoredContext, layers: Sequence[LayerKV], residuals: Mapping[int, Tensor]
) -> None:
    """`PageError` unless keys and values hold exactly the context's tokens, residuals no more."""
    tokens = len(context)
    what = f"a context of {tokens} tokens"
    for layer, (keys, values) in enumerate(layers):
        for name, tensor in (("keys", keys), ("values", values)):
            if tensor.dim() != 3 or tensor.shape[1] != tokens:
                raise PageError(
                    f"{name} of layer {layer} are {list(tensor.shape)}; "
                    f"{what} is stored as [kv_heads, {tokens}, head_dim]"
                )
    for layer, states in residuals.items():
        if states.dim() != 2 or states.shape[0] > tokens:
            raise PageError(
                f"residuals of layer {layer} are {list(states.shape)}; "
                f"{what} has at most [{tokens}, hidden]"
            )


def compact(tensor: Tensor) -> Tensor:
    """The tensor itself if it fills its memory, else a copy that does (a view keeps all of it)."""
    detached = tensor.detach()
    if detached.untyped_storage().nbytes() == detached.nbytes:
        return detached
    return detached.clone()
