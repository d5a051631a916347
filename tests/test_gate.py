"""The CKSim gate against the mean cosine over heads in float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cacheslide_agents.errors import RequestError
from cacheslide_agents.selection import CkSimGate, Gate


def keys_with_similarity() -> tuple[Tensor, Tensor, np.ndarray[tuple[int, ...], np.dtype]]:
    """New and cached keys [2, 50, 6] and their CKSim [50], from about -1 to 1."""
    generator = torch.Generator().manual_seed(11)
    cached, noise = torch.randn(2, 2, 50, 6, generator=generator, dtype=torch.float64)
    new = torch.linspace(-1, 1, 50)[:, None] * cached + 0.15 * noise
    similarity = [
        np.mean(
            [
                float(n @ c) / (np.linalg.norm(n) * np.linalg.norm(c))
                for n, c in zip(new[:, row].numpy(), cached[:, row].numpy(), strict=True)
            ]
        )
        for row in range(50)
    ]
    return new, cached, np.array(similarity)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("tau", [0.12, -0.5, 0.9])
def test_the_literal_gate_removes_keys_that_differ(dtype: torch.dtype, tau: float) -> None:
    new, cached, similarity = keys_with_similarity()
    removed = CkSimGate("literal", tau).removes(new.to(dtype), cached.to(dtype))
    assert removed.dtype == torch.bool
    assert removed.tolist() == (similarity < tau).tolist()
    assert 0 < removed.sum() < 50


@pytest.mark.parametrize("tau", [0.12, 0.05])
def test_the_converged_gate_removes_keys_that_agree(tau: float) -> None:
    new, cached, similarity = keys_with_similarity()
    removed = CkSimGate("converged", tau).removes(new.float(), cached.float())
    assert removed.tolist() == (1 - similarity < tau).tolist()
    assert 0 < removed.sum() < 50


def test_equal_keys_converge_in_a_narrow_dtype_too() -> None:
    _, cached, _ = keys_with_similarity()
    narrow = cached.bfloat16()
    assert CkSimGate("converged").removes(narrow, narrow).all()
    assert not CkSimGate("literal").removes(narrow, narrow).any()


def test_the_defaults_are_those_of_the_paper() -> None:
    gate = CkSimGate()
    assert isinstance(gate, Gate)
    assert (gate.reading, gate.tau, gate.every) == ("literal", 0.12, 4)


def test_no_rows_give_no_rows() -> None:
    empty = torch.empty(2, 0, 6)
    assert CkSimGate().removes(empty, empty).shape == (0,)


@pytest.mark.parametrize(
    "knobs", [{"reading": "loose"}, {"tau": math.nan}, {"tau": math.inf}, {"every": 0}], ids=str
)
def test_a_knob_out_of_range_is_refused_by_name(knobs: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(knobs))):
        CkSimGate(**knobs)
