"""What an alignment is measured against: its rules checked one by one, and the best there can be.

In: two token sequences and an `Alignment`, or lines of tokens to edit. Out: assertions and counts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from random import Random
from zlib import crc32

from cacheslide_agents.chunks import Alignment, Run

Line = list[int]


def check_alignment(
    new: Sequence[int], old: Sequence[int], found: Alignment, min_run: int = 16
) -> None:
    """Equal tokens, ascending, disjoint, maximal, long enough, and the common head a run."""
    new, old = list(new), list(old)
    assert (found.length, found.cached_length) == (len(new), len(old))
    assert found.prefix == common_head(new, old)
    before = Run(0, 0, 0)
    for index, run in enumerate(found.runs):
        assert new[run.start : run.stop] == old[run.cached_start : run.cached_stop]
        assert run.start >= before.stop and run.cached_start >= before.cached_stop
        assert run.length >= min_run or (index == 0 and run.start == run.cached_start == 0)
        assert run.stop <= len(new) and run.cached_stop <= len(old)
        if run.start > before.stop and run.cached_start > before.cached_stop:
            assert new[run.start - 1] != old[run.cached_start - 1], "could start earlier"
        assert index == 0 or (run.start, run.cached_start) != (before.stop, before.cached_stop)
        rest = [*found.runs[index + 1 :], Run(len(new), len(old), 0)][0]
        if run.stop < rest.start and run.cached_stop < rest.cached_start:
            assert new[run.stop] != old[run.cached_stop], "could end later"
        before = run


def common_head(new: Sequence[int], old: Sequence[int]) -> int:
    length = 0
    for left, right in zip(new, old, strict=False):
        if left != right:
            break
        length += 1
    return length


def most_matched(new: Sequence[int], old: Sequence[int], min_run: int = 16) -> int:
    """The most tokens that ascending, disjoint runs of at least `min_run` can hold: O(n m)."""
    width = len(old) + 1
    best = [[0] * width]
    equal = [0] * width
    within = [0] * width
    for i, token in enumerate(new, 1):
        row, now_equal, now_within = [0] * width, [0] * width, [0] * width
        for j in range(1, width):
            most = max(best[i - 1][j], row[j - 1])
            if token == old[j - 1]:
                now_equal[j] = equal[j - 1] + 1
                if now_equal[j] >= min_run:
                    opened = best[i - min_run][j - min_run] + min_run
                    longer = within[j - 1] + 1 if equal[j - 1] >= min_run else 0
                    now_within[j] = max(opened, longer)
                    most = max(most, now_within[j])
            row[j] = most
        best.append(row)
        equal, within = now_equal, now_within
    return best[-1][-1]


def flat(lines: Sequence[Line]) -> Line:
    return [token for line in lines for token in line]


def log_lines(random: Random, count: int, length: int, fields: int, values: int) -> list[Line]:
    """Lines that differ in `fields` of `length` tokens at most, each with so many `values`."""
    lines = [[1000 + place for place in range(length)] for _ in range(count)]
    for line in lines:
        for field in range(fields):
            line[(7 * field + 1) % length] = random.randrange(values)
    return lines


def edit_lines(
    random: Random, lines: Sequence[Line], edits: int, to_add: Sequence[Line]
) -> tuple[list[Line], int]:
    """The lines after that many insertions, deletions and replacements, and the tokens put in.

    What is put in is drawn from `to_add`.
    """
    edited, put_in = list(lines), 0
    for place in sorted(random.sample(range(len(lines)), edits), reverse=True):
        operation = random.choice(("insert", "delete", "replace"))
        added = [] if operation == "delete" else [random.choice(to_add)]
        edited[place : place + (operation != "insert")] = added
        put_in += len(flat(added))
    return edited, put_in


def words(text: str) -> list[int]:
    """A simple tokenizer: one id per word, mark or stretch of white space."""
    return [crc32(piece.encode()) for piece in re.findall(r"\w+|[^\w\s]|\s+", text)]
