"""The slot map against its definition: a row sees the rows up to it, wherever they lie."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from cacheslide_agents.pages.slots import SlotMap
from torch_cacheslide.attention import attend
from torch_cacheslide.layout import Layouts


def slot_map(corrected: list[int], prompt: int, rows: int, spare: int | None = None) -> SlotMap:
    chosen = np.array(sorted(corrected), dtype=np.int64)
    return SlotMap(chosen, prompt=prompt, rows=rows, spare=len(chosen) if spare is None else spare)


@st.composite
def maps(draw: st.DrawFn) -> tuple[SlotMap, int]:
    prompt = draw(st.integers(1, 40))
    decoded = draw(st.integers(0, 50))
    corrected = draw(st.sets(st.integers(0, prompt - 1), max_size=prompt))
    spare = len(corrected) + draw(st.integers(0, 3))
    return slot_map(list(corrected), prompt, prompt + decoded, spare), prompt + decoded


@given(maps())
def test_every_row_sees_itself_and_all_rows_before_it_once(case: tuple[SlotMap, int]) -> None:
    slots, rows = case
    for row in range(rows):
        owners = slots.owners(*slots.seen(row))
        assert sorted(owners[owners <= row].tolist()) == list(range(row + 1))


@given(maps())
def test_no_two_rows_share_a_slot(case: tuple[SlotMap, int]) -> None:
    slots, rows = case
    taken = slots.slots(np.arange(rows))
    assert len(set(taken.tolist())) == rows


def test_corrected_rows_leave_their_homes_and_decoding_takes_them_first() -> None:
    slots = slot_map([2, 5], prompt=8, rows=12)
    home = slots.spare + np.arange(12)
    assert slots.slots(np.array([2, 5])).tolist() == [1, 0]
    assert slots.slots(np.arange(8, 12)).tolist() == [home[2], home[5], home[8], home[9]]
    unmoved = np.array([0, 1, 3, 4, 6, 7])
    assert slots.slots(unmoved).tolist() == home[unmoved].tolist()


def test_a_prompt_without_room_for_decoding_keeps_its_vacated_slots_hidden() -> None:
    slots = slot_map([0], prompt=3, rows=3)
    assert slots.owners(0, 4).tolist() == [0, 3, 1, 2]


def test_only_layers_that_were_moved_are() -> None:
    slots = slot_map([1], prompt=3, rows=4)
    slots.move(2)
    assert [slots.moved(layer) for layer in range(4)] == [False, False, True, False]
    assert list(slots.moved_layers) == [2]


class _Layer(torch.nn.Module):
    layer_idx = 0


def ordered(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: list[int]
) -> torch.Tensor:
    """Plain causal attention over keys in order, one row at a time."""
    outputs = []
    for at, row in enumerate(rows):
        seen = slice(0, row + 1)
        outputs.append(
            scaled_dot_product_attention(
                query[:, :, at : at + 1], keys[:, :, seen], values[:, :, seen]
            )
        )
    return torch.cat(outputs, dim=2).transpose(1, 2)


@pytest.mark.parametrize("active", [[3, 4, 5, 17, 30, 39], list(range(2, 40)), [40], [41], [44]])
def test_attention_over_slots_as_they_lie_equals_attention_in_order(active: list[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(1, 2, 45, 8, generator=generator) for _ in "kv")
    query = torch.randn(1, 2, len(active), 8, generator=generator)
    slots = slot_map([4, 17, 30], prompt=40, rows=45)
    slots.move(0)
    place = torch.from_numpy(slots.slots(np.arange(45)))
    lying_keys, lying_values = (torch.full((1, 2, 48, 8), 1e3) for _ in "kv")
    lying_keys[:, :, place], lying_values[:, :, place] = keys, values
    rows: npt.NDArray[np.int64] = np.array(active, dtype=np.int64)
    got, _ = attend(
        _Layer(),
        query,
        lying_keys,
        lying_values,
        None,
        scaling=8**-0.5,
        layout=Layouts(rows, torch.device("cpu"), slots),
    )
    torch.testing.assert_close(got, ordered(query, keys, values, active), atol=1e-6, rtol=1e-5)
