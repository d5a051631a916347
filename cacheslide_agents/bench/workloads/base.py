"""What a workload is made of: a turn, its draft, and the token limits it is built under.

In: records of the data folder. Out: `Turn`s, each a pair of prompts of which the second changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from cacheslide_agents.chunks import ChunkedPrompt
from cacheslide_agents.prompt.template import PromptTemplate

_CUT_STEP = 16
"""Characters within which `cut_middle` finds the longest text that fits."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One changed turn: `populate` is the prompt of turn t-1, `measure` that of turn t.

    `answers` are the gold answers of turn t, none where the task has no short answer.
    """

    id: str
    turn: int
    task: str
    populate: ChunkedPrompt
    measure: ChunkedPrompt
    answers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Draft:
    """A turn that is not built yet; `build` answers `None` when it cannot meet the limits."""

    id: str
    turn: int
    task: str
    build: Callable[[], Turn | None]


@dataclass(frozen=True, slots=True)
class Limits:
    """How long prompts may be. `text` counts the tokens of a text, `prompt` those of a prompt."""

    text: Callable[[str], int]
    prompt: Callable[[ChunkedPrompt], int]
    max_prompt_tokens: int = 4096

    def fits(self, prompt: ChunkedPrompt) -> bool:
        return self.prompt(prompt) <= self.max_prompt_tokens


@cache
def template(name: str) -> PromptTemplate:
    """A packaged template, compiled once."""
    return PromptTemplate.named(name)


def cut_middle(parts: Sequence[str], limit: int, count: Callable[[str], int]) -> tuple[str, ...]:
    """`parts` with the middle of their concatenation taken out, to at most `limit` tokens together.

    As many characters stay before the gap as after it; a note of what is missing marks the gap.
    """
    whole = "".join(parts)
    if count(whole) <= limit:
        return tuple(parts)
    low, high = 0, len(whole)
    while high - low > _CUT_STEP:
        keep = (low + high) // 2
        if sum(count(part) for part in _without_middle(parts, keep)) <= limit:
            low = keep
        else:
            high = keep
    return _without_middle(parts, low)


def _without_middle(parts: Sequence[str], keep: int) -> tuple[str, ...]:
    """Keep the first and the last `keep / 2` characters of the concatenation."""
    total = sum(map(len, parts))
    gap = range(keep // 2, total - (keep - keep // 2))
    note = f"\n[... {len(gap)} characters left out ...]\n"
    kept, start = [], 0
    for part in parts:
        first, last = (min(max(edge - start, 0), len(part)) for edge in (gap.start, gap.stop))
        opens_here = start <= gap.start < start + len(part)
        kept.append(part[:first] + (note if opens_here else "") + part[last:])
        start += len(part)
    return tuple(kept)
