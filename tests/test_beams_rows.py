"""Rows of answers that share a prompt: who sees what, and what is kept when the others go."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torch_cacheslide.attention import attend
from torch_cacheslide.branches import BranchLayouts
from torch_cacheslide.cache import WorkingCache
from torch_cacheslide.text import TextStream

PROMPT, ROWS, SPARE = 8, 14, 2
APART, IN_ORDER = 0, 1


def cache_with_a_layer_apart() -> WorkingCache:
    """Two layers with the same random row contents; in the first, corrected rows are elsewhere."""
    generator = torch.Generator().manual_seed(0)
    contents = torch.randn(2, 1, ROWS, 4, generator=generator)
    keys, values = torch.full((2, 2, 1, ROWS + SPARE, 4), torch.nan)
    cache = WorkingCache(keys, values, spare=SPARE)
    cache.keep_apart(np.array([3, 5]), prompt=PROMPT)
    assert cache.slots is not None
    cache.slots.move(APART)
    rows = np.arange(ROWS)
    for memory, content in zip((cache._all_keys, cache._all_values), contents, strict=True):
        memory[APART][:, cache.slots.slots(rows)] = content
        memory[IN_ORDER][:, SPARE:] = content
    return cache


def test_answers_see_the_prompt_and_their_own_rows_wherever_those_lie() -> None:
    cache, rows = cache_with_a_layer_apart(), np.array([11, 12, 13])
    seen = torch.zeros(3, ROWS + 1, dtype=torch.bool)
    seen[:, :PROMPT] = True
    for row, path in enumerate([(8, 11), (9, 12), (8, 13)]):
        seen[row, list(path)] = True
    layouts = BranchLayouts(rows, torch.device("cpu"), cache, seen)
    query = torch.randn(1, 1, 3, 4, generator=torch.Generator().manual_seed(1))
    keys, values = cache.keys[IN_ORDER], cache.values[IN_ORDER]
    weights = (query[0] @ keys.transpose(1, 2)).masked_fill(~seen[:, :ROWS], -torch.inf)
    expected = weights.softmax(-1) @ values
    for layer, every in ((IN_ORDER, (cache.keys, cache.values)), (APART, _everything(cache))):
        module: Any = SimpleNamespace(layer_idx=layer)
        all_keys, all_values = (memory[layer][None].nan_to_num(99.0) for memory in every)
        output, _ = attend(module, query, all_keys, all_values, None, scaling=1.0, layout=layouts)
        torch.testing.assert_close(output[0].transpose(0, 1), expected)


def _everything(cache: WorkingCache) -> tuple[torch.Tensor, torch.Tensor]:
    return cache._all_keys, cache._all_values


def test_the_rows_that_are_kept_move_up_in_every_layer() -> None:
    cache, kept = cache_with_a_layer_apart(), np.array([9, 11, 12])
    before = cache.values[IN_ORDER].clone()
    free = torch.arange(ROWS, dtype=torch.float32)[:, None, None].expand(ROWS, 1, 4)
    for captured in cache.captured:
        for rows in (np.arange(PROMPT), np.array([8, 9]), np.array([10, 11, 12])):
            captured.append((rows, free[torch.from_numpy(rows)]))
    cache.keep(kept, behind=PROMPT)
    places = [*range(PROMPT), *kept.tolist()]
    for layer in (APART, IN_ORDER):
        torch.testing.assert_close(cache.values_of(layer, PROMPT + 3), before[:, places])
        (rows, keys) = cache.captured[layer][-1]
        assert len(cache.captured[layer]) == 2
        assert rows.tolist() == [8, 9, 10] and keys[:, 0, 0].tolist() == kept.tolist()


def test_nothing_kept_leaves_the_prompt_alone() -> None:
    cache = cache_with_a_layer_apart()
    before = cache.values_of(APART, PROMPT).clone()
    cache.captured[APART] = [(np.arange(PROMPT), torch.zeros(PROMPT, 1, 4))]
    cache.keep(np.zeros(0, dtype=np.int64), behind=PROMPT)
    torch.testing.assert_close(cache.values_of(APART, PROMPT), before)
    assert [rows.tolist() for rows, _ in cache.captured[APART]] == [list(range(PROMPT))]


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_forked_texts_go_their_own_ways(
    tokenizers: Callable[[str], Any], data: st.DataObject
) -> None:
    tokenizer = tokenizers(data.draw(st.sampled_from(["llama3", "mistral"])))
    ids = st.lists(st.integers(0, len(tokenizer) - 1), max_size=12)
    start, first, second = data.draw(ids), data.draw(ids), data.draw(ids)
    stops = data.draw(st.lists(st.sampled_from(["a", "the", "e ", "s s", "\n"]), max_size=2))
    stream = TextStream(tokenizer, stops)
    begun = "".join(stream.push(token)[0] for token in start)
    twin = stream.fork()
    for branch, rest in ((stream, first), (twin, second)):
        text = begun + "".join(branch.push(token)[0] for token in rest) + branch.flush()
        alone = TextStream(tokenizer, stops)
        assert text == "".join(alone.push(token)[0] for token in [*start, *rest]) + alone.flush()
