"""Attention transfer: each CoPE layer learns to give what the RoPE layer gave.

In: windows. Out: gradients in the student's attention modules, and the mean relative error.
Every layer is fed what the original model's layer was fed, so layers learn side by side and an
error in one is not the next one's concern.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from cacheslide_agents.training.material import Window

Seen = list[tuple[Tensor, Tensor]]
"""Per layer, the attention module's input and output [1, n, hidden]."""


@contextmanager
def watch_attention(model: Any) -> Iterator[Seen]:
    """Collects what goes into and comes out of every attention module while the block runs."""
    seen: Seen = []

    def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        seen.append((hidden, output[0]))

    hooks = [
        layer.self_attn.register_forward_hook(keep, with_kwargs=True)
        for layer in model.model.layers
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def transfer(teacher: Any, student: Any, window: Window, share: float) -> float:
    """Adds `share` times the gradients of one window; returns the mean relative error.

    The error of a layer is |student - teacher|^2 / |teacher|^2, both weighted over the window.
    """
    with torch.no_grad(), watch_attention(teacher) as seen:
        teacher.model(window.ids[None], use_cache=False)
    position = student.model.rotary_emb(seen[0][0], position_ids=None)
    weights, total = window.weights, 0.0
    for layer, (hidden, wanted) in zip(student.model.layers, seen, strict=True):
        found, _ = layer.self_attn(
            hidden_states=hidden, position_embeddings=position, attention_mask=None
        )
        error = _energy(found - wanted, weights) / _energy(wanted, weights)
        (error * share).backward()  # type: ignore[no-untyped-call]
        total += float(error.detach())
    return total / len(seen)


def _energy(tensor: Tensor, weights: Tensor) -> Tensor:
    wide = torch.promote_types(tensor.dtype, torch.float32)
    return (tensor.to(wide).square().sum(dim=-1) * weights).sum()
