"""The four workloads on the real rows, in SmolLM2's tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cacheslide_agents.bench.workloads import TASKS, Limits, Turn, load_turns
from cacheslide_agents.chunks import Alignment, ChunkedPrompt, EncodedPrompt
from cacheslide_agents.prompt.align import align
from cacheslide_agents.prompt.chat import ChatEncoder

ROWS = 6
Load = Callable[[str], list[Turn]]
Ids = Callable[[ChunkedPrompt], tuple[int, ...]]
Encode = Callable[[ChunkedPrompt], EncodedPrompt]


@pytest.fixture(scope="module")
def encode(smollm2_tokenizer: Any) -> Encode:
    return ChatEncoder(smollm2_tokenizer).encode


@pytest.fixture(scope="module")
def ids(encode: Encode) -> Ids:
    return lambda prompt: encode(prompt).ids


@pytest.fixture(scope="module")
def load(data_dir: Path, smollm2_tokenizer: Any, ids: Ids) -> Load:
    limits = Limits(
        lambda text: len(smollm2_tokenizer(text, add_special_tokens=False)["input_ids"]),
        lambda prompt: len(ids(prompt)),
    )
    return lambda task: load_turns(task, data_dir, limits, limit=ROWS, seed=1)


def aligned(turn: Turn, ids: Ids) -> Alignment:
    return align(ids(turn.measure), ids(turn.populate))


def test_reflexion_inserts_reflections_and_moves_all_passages(load: Load, ids: Ids) -> None:
    for turn in load("reflexion"):
        found = aligned(turn, ids)
        assert 1200 <= found.length <= 4096
        (edit,) = found.edits()
        assert edit.stop - edit.start >= 20  # a reflection is a sentence or more
        assert found.runs[-1].length > 700  # ten passages and the question come after it
        assert found.runs[-1].shift == found.length - found.cached_length > 0
        assert turn.answers


def test_memgpt_edits_a_few_lines_of_a_prompt_of_at_least_1300_tokens(load: Load, ids: Ids) -> None:
    for turn in load("memgpt"):
        found = aligned(turn, ids)
        assert 1300 <= found.length <= 4096
        header, fact, exchange = found.edits()
        assert header.stop - header.start < 40  # time stamp and counters
        assert fact.cached_stop == fact.cached_start  # one more line
        assert exchange.cached_stop - exchange.cached_start < 5
        assert found.matched > 0.9 * found.length


def test_swe_agent_elides_an_output_within_a_window_of_4096_tokens(load: Load, ids: Ids) -> None:
    for turn in load("swe_agent"):
        found = aligned(turn, ids)
        assert found.length <= 4096
        new = "".join(message.content for message in turn.measure.messages)
        assert "Old output omitted" in new
        assert new.count("\nOutput:\n") + new.startswith("Output:\n") <= 5
        assert any(edit.cached_stop > edit.cached_start for edit in found.edits())
        assert not turn.answers


def test_append_keeps_every_token_of_the_previous_prompt(load: Load, ids: Ids) -> None:
    tasks = [turn.task for turn in load("append")]
    assert sorted(tasks) == ["memgpt"] * 2 + ["reflexion"] * 2 + ["swe_agent"] * 2
    for turn in load("append"):
        found = aligned(turn, ids)
        assert found.prefix == found.cached_length < found.length


def chunk_tokens(encoded: EncodedPrompt) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {s.id: (s.digest, encoded.ids[s.start : s.stop]) for s in encoded.spans}


@pytest.mark.parametrize("task", TASKS)
def test_a_chunk_whose_text_is_the_same_keeps_its_tokens(
    task: str, load: Load, encode: Encode
) -> None:
    """So caches of chunks computed alone can hit wherever they may."""
    for turn in load(task):
        old, new = chunk_tokens(encode(turn.populate)), chunk_tokens(encode(turn.measure))
        same = [name for name in old.keys() & new.keys() if old[name][0] == new[name][0]]
        assert len(same) >= 3
        assert [name for name in same if old[name] != new[name]] == []
