"""CoPE attention against its formula, written out entry by entry in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from cacheslide_agents.position.contextual import CanonicalMass, contextual_attention

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


def inputs(
    heads: int, kv_heads: int, tokens: int, head_dim: int, npos: int = 16, lean: float = 0.0
) -> Inputs:
    """float64 query, key, value, embedding; `lean` below 0 keeps the gates small."""
    generator = torch.Generator().manual_seed(heads * 1000 + tokens)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    query, key = normal(heads, tokens, head_dim), normal(kv_heads, tokens, head_dim)
    query[..., 0], key[..., 0] = math.sqrt(head_dim), lean
    return query, key, normal(kv_heads, tokens, head_dim), normal(heads, npos, head_dim)


def by_formula(given: Inputs, row: int, head: int, mass: CanonicalMass | None = None) -> Tensor:
    """One row of one head, key by key, as the paper has it."""
    query, key, value, embedding = given
    kv_head = head * len(key) // len(query)
    q, scale, last = query[head, row], query.shape[-1] ** -0.5, embedding.shape[1] - 1
    scores = ((key[kv_head, : row + 1] @ q) * scale).tolist()
    seen = (embedding[head] @ q).tolist()
    gates = [1 / (1 + math.exp(-score)) for score in scores]
    if mass is not None and mass.first_row <= row < mass.last_row:
        total = sum(gates[mass.start : mass.stop])
        for place in range(mass.start, mass.stop):
            gates[place] *= float(mass.mass[head]) / total
    logits = []
    for place, score in enumerate(scores):
        position = min(math.fsum(gates[place:]), last)
        low = int(position)
        high = min(low + 1, last)
        logits.append(score + seen[low] + (position - low) * (seen[high] - seen[low]))
    weights = torch.softmax(torch.tensor(logits, dtype=torch.float64), dim=0)
    return weights @ value[kv_head, : row + 1]


def attend(given: Inputs, rows: Tensor, masses: tuple[CanonicalMass, ...] = ()) -> Tensor:
    query, key, value, embedding = given
    scale = query.shape[-1] ** -0.5
    picked = query[:, rows]
    return contextual_attention(picked, key, value, embedding, rows, scale=scale, masses=masses)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tokens", "head_dim", "lean"),
    [
        (1, 1, 1, 8, 0.0),
        (3, 1, 65, 8, 0.0),
        (4, 4, 64, 16, -1.0),
        (9, 3, 130, 80, 0.0),
        (2, 1, 700, 8, 0.0),
        (2, 1, 700, 8, -6.0),  # positions never reach the last one
    ],
)
def test_every_row_is_what_the_formula_gives(
    heads: int, kv_heads: int, tokens: int, head_dim: int, lean: float
) -> None:
    given = inputs(heads, kv_heads, tokens, head_dim, lean=lean)
    found = attend(given, torch.arange(tokens))
    for row in {0, tokens // 2, tokens - 1, min(63, tokens - 1)}:
        for head in range(heads):
            torch.testing.assert_close(
                found[head, row], by_formula(given, row, head), rtol=1e-9, atol=1e-11
            )


def test_a_few_rows_alone_are_the_same_as_among_all() -> None:
    given = inputs(4, 2, 600, 16)
    rows = torch.tensor([0, 3, 4, 5, 299, 300, 511, 599])
    torch.testing.assert_close(attend(given, rows), attend(given, torch.arange(600))[:, rows])


def test_with_a_single_position_rows_still_see_nothing_behind_them() -> None:
    given = inputs(2, 1, 600, 8, npos=1)
    rows = torch.tensor([20, 590, 599])
    found = attend(given, rows)
    for number, row in enumerate(rows.tolist()):
        torch.testing.assert_close(found[1, number], by_formula(given, row, 1))


def test_one_query_may_see_all_keys() -> None:
    given = inputs(2, 2, 300, 8)
    last = torch.tensor([299])
    torch.testing.assert_close(attend(given, last)[1, 0], by_formula(given, 299, 1))


def test_keys_that_a_row_does_not_see_neither_count_nor_answer() -> None:
    query, key, value, embedding = inputs(2, 1, 600, 8)
    seen = torch.rand(3, 600, generator=torch.Generator().manual_seed(0)) < 0.6
    seen[:, 599] = True
    rows = torch.tensor([599, 599, 599])
    found = contextual_attention(
        query[:, :3], key, value, embedding, rows, scale=8**-0.5, seen=seen
    )
    for number in range(3):
        kept = seen[number]
        alone = contextual_attention(
            query[:, number, None],
            key[:, kept],
            value[:, kept],
            embedding,
            kept.sum()[None] - 1,
            scale=8**-0.5,
        )
        torch.testing.assert_close(found[:, number], alone[:, 0])


def test_gradients_equal_finite_differences() -> None:
    query, key, value, embedding = (each.requires_grad_() for each in inputs(2, 1, 5, 4, npos=4))
    rows = torch.arange(5)
    # A position that lands on a whole number has no derivative; with these numbers none does.
    assert torch.autograd.gradcheck(
        lambda q, k, v, e: contextual_attention(q, k, v, e, rows, scale=0.5),
        (query, key, value, embedding),
    )


def test_gradients_pass_through_the_band_and_what_lies_beyond_it() -> None:
    query, key, value, embedding = inputs(1, 1, 400, 4, npos=6)
    rows = torch.tensor([399])

    def loss(keys: Tensor) -> Tensor:
        found = contextual_attention(query[:, rows], keys, value, embedding, rows, scale=0.5)
        return found.sum()

    keys = key.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(keys), keys)
    for place in (10, 395):
        step = torch.zeros_like(key)
        step[0, place, 1] = 1e-6
        slope = (loss(key + step) - loss(key - step)) / 2e-6
        torch.testing.assert_close(gradient[0, place, 1], slope, rtol=1e-5, atol=1e-9)


def test_canonical_mass_replaces_what_an_update_adds_to_the_rows_of_one_chunk() -> None:
    given = inputs(4, 2, 80, 8, npos=64)
    mass = CanonicalMass(20, 30, 40, 60, torch.tensor([1.0, 2.5, 0.0, 7.0], dtype=torch.float64))
    found = attend(given, torch.arange(80), (mass,))
    for row in (25, 39, 40, 59, 60, 79):
        for head in range(4):
            torch.testing.assert_close(found[head, row], by_formula(given, row, head, mass))


def test_a_mass_equal_to_the_gates_own_sum_changes_nothing() -> None:
    given = inputs(1, 1, 40, 8, npos=64)
    query, key = given[0][0], given[1][0]
    row = torch.tensor([39])
    own = torch.sigmoid(query[39] @ key[5:15].T * 8**-0.5).sum()
    plain = attend(given, row)
    torch.testing.assert_close(
        attend(given, row, (CanonicalMass(5, 15, 39, 40, own[None]),)), plain
    )


def test_keys_may_move_without_being_touched() -> None:
    """Appending rows and moving keys: only the gates between a key and its reader count."""
    query, key, value, embedding = inputs(2, 1, 50, 8)
    alone = attend((query, key, value, embedding), torch.arange(50))
    # Keys that no gate opens for, put in front, shift every token by 30 and no position.
    shut = torch.zeros(1, 30, 8, dtype=torch.float64)
    shut[..., 0] = -1e6
    moved = contextual_attention(
        query,
        torch.cat((shut, key), dim=1),
        torch.cat((torch.zeros_like(shut), value), dim=1),
        embedding,
        torch.arange(30, 80),
        scale=8**-0.5,
    )
    torch.testing.assert_close(moved, alone)
