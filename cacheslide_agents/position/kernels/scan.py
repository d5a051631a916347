"""The Triton kernels: query rows over the keys before them, with contextual positions or without.

In: pointers and strides, from `launch`. Out: per program, the attention output of one block of rows
of one head. Needs triton; `launch` imports this module only when a kernel is to run.

A block of rows meets its keys from the last one backwards while it counts gates. Once every row has
counted past the last position, whatever lies further back stands there: from then on keys are
scanned as in flash attention, forwards, with one number per row added to all its logits.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _offsets(places, inside, slots, page, slot, SLOTTED: tl.constexpr, PAGE_SIZE: tl.constexpr):
    """Where the keys at `places` lie, in numbers from their head's first one."""
    at = places.to(tl.int64)
    if SLOTTED:
        at = tl.load(slots + places, mask=inside, other=0).to(tl.int64)
    return at // PAGE_SIZE * page + at % PAGE_SIZE * slot if PAGE_SIZE > 0 else at * slot


@triton.jit
def _fetch(base, offsets, inside, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """[n, WIDTH]: vectors of DIM numbers, filled up with 0."""
    column = tl.arange(0, WIDTH)
    wanted = inside[:, None] & (column < DIM)[None, :]
    return tl.load(base + offsets[:, None] + column[None, :], mask=wanted, other=0.0)


@triton.jit
def _scaled(gates, places, factors, real, borders, row_count, masses):
    """Gates [rows, keys] times their row's factor wherever a canonical mass stands."""
    for each in range(masses):
        start, stop = tl.load(borders + 4 * each), tl.load(borders + 4 * each + 1)
        within = (places >= start) & (places < stop)
        factor = tl.load(factors + each * row_count, mask=real, other=1.0)
        gates = tl.where(within[None, :], gates * factor[:, None], gates)
    return gates


@triton.jit
def _absorb(logits, values, most, total, output, PRECISION: tl.constexpr):
    """One step of online softmax to base 2; a row that saw nothing yet has `most` = -inf."""
    higher = tl.maximum(most, tl.max(logits, axis=1))
    safe = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp2(logits - safe[:, None])
    shrink = tl.exp2(most - safe)
    total = total * shrink + tl.sum(weights, axis=1)
    output = output * shrink[:, None]
    output = tl.dot(weights.to(values.dtype), values, output, input_precision=PRECISION)
    return higher, total, output


@triton.jit(do_not_specialize=["row_count", "masses", "each"])
def mass_factors(
    query, key, rows, slots, borders, mass, factors,
    query_head, query_row, key_page, key_head, key_slot,
    row_count, masses, each, scale, last,
    GROUPS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    SLOTTED: tl.constexpr, PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What each row multiplies the gates of canonical mass `each` by; [0, each) apply already.

    `borders` [masses, 4] int32 (start, stop, first row, last row); `mass` [heads, masses] and
    `factors` [heads, masses, rows] float32.
    """
    head = tl.program_id(1).to(tl.int64)
    number = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = number < row_count
    row = tl.load(rows + number, mask=real, other=-1)
    border = borders + 4 * each
    start, stop = tl.load(border), tl.load(border + 1)
    key += head // GROUPS * key_head
    factors += head * masses * row_count + number
    at = number.to(tl.int64) * query_row
    queries = _fetch(query + head * query_head, at, real, DIM, WIDTH)
    found = tl.zeros([ROWS], dtype=tl.float32)
    for first in range(start, stop, KEYS):
        places = first + tl.arange(0, KEYS)
        inside = places < stop
        offsets = _offsets(places, inside, slots, key_page, key_slot, SLOTTED, PAGE_SIZE)
        keys = _fetch(key, offsets, inside, DIM, WIDTH)
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scale
        seen = inside[None, :] & (places[None, :] <= row[:, None])
        gates = tl.where(seen, tl.sigmoid(scores), 0.0)
        gates = _scaled(gates, places, factors, real, borders, row_count, each)
        found += tl.sum(gates, axis=1)
    counting = (row >= tl.load(border + 2)) & (row < tl.load(border + 3))
    wanted = tl.load(mass + head * masses + each) + tl.zeros([ROWS], dtype=tl.float32)
    counting = counting & ((wanted < last) | (found < last))  # the last position: that or more
    factor = tl.where(counting, wanted / tl.maximum(found, 1e-30), 1.0)
    tl.store(factors + each * row_count, factor, mask=real)


@triton.jit(do_not_specialize=["row_count", "masses"])
def row_attention(
    query, key, value, embedding, rows, slots, borders, factors, output,
    query_head, query_row, key_page, key_head, key_slot, value_page, value_head, value_slot,
    output_head, output_row, row_count, masses, scale, last,
    GROUPS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    CONTEXTUAL: tl.constexpr, NPOS: tl.constexpr, MASSES: tl.constexpr, NEAR: tl.constexpr,
    SLOTTED: tl.constexpr, PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One block of ROWS rows of one head. `last` is the last position, NPOS a power of 2 above it.

    `embedding` [heads, last + 1, DIM] is contiguous. A row of -1 sees nothing and gets 0. NEAR keys
    at a time are counted, KEYS at a time come after.
    """
    head = tl.program_id(1).to(tl.int64)
    # The blocks with most keys start first.
    number = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS + tl.arange(0, ROWS)
    real = number < row_count
    row = tl.load(rows + number, mask=real, other=-1)
    stop = tl.max(row) + 1
    whole = tl.min(tl.where(row < 0, stop, row)) + 1  # keys that all rows of the block see
    at = number.to(tl.int64)
    queries = _fetch(query + head * query_head, at * query_row, real, DIM, WIDTH)
    key += head // GROUPS * key_head
    value += head // GROUPS * value_head
    most = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    result = tl.zeros([ROWS, WIDTH], dtype=tl.float32)
    beyond = tl.zeros([ROWS], dtype=tl.float32)
    if CONTEXTUAL:
        place = tl.arange(0, NPOS)
        vectors = _fetch(
            embedding + head * (last + 1) * DIM, place * DIM, place <= last, DIM, WIDTH
        )
        vectors = vectors.to(queries.dtype)
        table = tl.dot(queries, tl.trans(vectors), input_precision=PRECISION)  # [ROWS, NPOS]
        beyond = tl.sum(tl.where((place == last)[None, :], table, 0.0), axis=1)
        if MASSES:
            factors += head * masses * row_count + number
        passed = tl.where(row < 0, last + 1.0, 0.0)  # gates counted so far
        while (stop > 0) & (tl.min(passed) < last):
            places = stop - 1 - tl.arange(0, NEAR)
            inside = places >= 0
            offsets = _offsets(places, inside, slots, key_page, key_slot, SLOTTED, PAGE_SIZE)
            keys = _fetch(key, offsets, inside, DIM, WIDTH)
            scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scale
            seen = inside[None, :] & (places[None, :] <= row[:, None])
            gates = tl.where(seen, tl.sigmoid(scores), 0.0)
            if MASSES:
                gates = _scaled(gates, places, factors, real, borders, row_count, masses)
            positions = tl.minimum(passed[:, None] + tl.cumsum(gates, axis=1), last * 1.0)
            passed += tl.sum(gates, axis=1)
            low = positions.to(tl.int32)
            below = tl.gather(table, low, axis=1)
            above = tl.gather(table, tl.minimum(low + 1, last), axis=1)
            bias = below + (above - below) * (positions - low)
            logits = tl.where(seen, (scores + bias) * LOG2_E, float("-inf"))
            offsets = _offsets(places, inside, slots, value_page, value_slot, SLOTTED, PAGE_SIZE)
            values = _fetch(value, offsets, inside, DIM, WIDTH)
            most, total, result = _absorb(logits, values, most, total, result, PRECISION)
            stop -= NEAR
    bare = tl.minimum(whole, tl.maximum(stop, 0)) // KEYS * KEYS  # up to here nothing is hidden
    for first in range(0, bare, KEYS):
        places = first + tl.arange(0, KEYS)
        inside = places < bare
        offsets = _offsets(places, inside, slots, key_page, key_slot, SLOTTED, PAGE_SIZE)
        keys = _fetch(key, offsets, inside, DIM, WIDTH)
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        logits = scores * (scale * LOG2_E) + (beyond * LOG2_E)[:, None]
        offsets = _offsets(places, inside, slots, value_page, value_slot, SLOTTED, PAGE_SIZE)
        values = _fetch(value, offsets, inside, DIM, WIDTH)
        most, total, result = _absorb(logits, values, most, total, result, PRECISION)
    for first in range(bare, stop, KEYS):
        places = first + tl.arange(0, KEYS)
        inside = places < stop
        offsets = _offsets(places, inside, slots, key_page, key_slot, SLOTTED, PAGE_SIZE)
        keys = _fetch(key, offsets, inside, DIM, WIDTH)
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        seen = inside[None, :] & (places[None, :] <= row[:, None])
        logits = scores * (scale * LOG2_E) + (beyond * LOG2_E)[:, None]
        logits = tl.where(seen, logits, float("-inf"))
        offsets = _offsets(places, inside, slots, value_page, value_slot, SLOTTED, PAGE_SIZE)
        values = _fetch(value, offsets, inside, DIM, WIDTH)
        most, total, result = _absorb(logits, values, most, total, result, PRECISION)
    seeing = row >= 0
    result = tl.where(seeing[:, None], result / tl.where(total > 0.0, total, 1.0)[:, None], 0.0)
    column = tl.arange(0, WIDTH)
    there = output + head * output_head + at[:, None] * output_row + column[None, :]
    tl.store(
        there, result.to(output.dtype.element_ty), mask=real[:, None] & (column < DIM)[None, :]
    )
