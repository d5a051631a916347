"""End-to-end distillation: the CoPE model's next-token distributions follow the original's.

In: windows. Out: gradients in the student's attention modules, and the weighted KL divergence.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import kl_div, log_softmax
from torch.utils.checkpoint import checkpoint

from cacheslide_agents.training.material import Window

VOCABULARY_ROWS = 256
"""Positions whose distributions are compared at once: [rows, vocabulary] is what takes memory."""


def distil(teacher: Any, student: Any, window: Window, share: float) -> float:
    """Adds `share` times the gradients of one window; returns its KL(teacher || student)."""
    ids = window.ids
    with torch.no_grad():
        wanted = teacher.model(ids[None], use_cache=False).last_hidden_state[0]
    found = _hidden_states(student, ids)
    cut = found.detach().requires_grad_()
    total = 0.0
    for start in range(0, len(ids), VOCABULARY_ROWS):
        rows = slice(start, start + VOCABULARY_ROWS)
        with torch.no_grad():
            target = _log_probabilities(teacher.lm_head(wanted[rows]))
        output = _log_probabilities(student.lm_head(cut[rows]))
        divergence = kl_div(output, target, log_target=True, reduction="none").sum(dim=-1)
        loss = (divergence * window.weights[rows]).sum()
        (loss * share).backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
    torch.autograd.backward([found], [cut.grad])
    return total


def _hidden_states(student: Any, ids: Tensor) -> Tensor:
    """[n, hidden]; what happens inside a layer is computed again on the way back, not kept."""
    hidden = student.model.embed_tokens(ids[None])
    position = student.model.rotary_emb(hidden, position_ids=None)
    for layer in student.model.layers:
        hidden = checkpoint(layer, hidden, position_embeddings=position, use_reentrant=False)
    normed: Tensor = student.model.norm(hidden)[0]
    return normed


def _log_probabilities(logits: Tensor) -> Tensor:
    return log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), dim=-1)
