"""Contextual positions (CoPE): how far back a key lies is counted by gates, not by tokens.

In: position-free queries of some rows, keys and values of everything before them, one position
embedding per head. Out: the attention output of those rows. Keys carry no position, so a cached key
is good wherever its text moves.

CoPE: Golovneva et al., 2024, "Contextual Position Encoding: Learning to Count What's Important".
With gates g_ik = sigmoid(q_i . k_k * scale), key j stands at p_ij = g_ij + ... + g_ii from row i,
clamped to npos - 1; its logit is q_i . k_j * scale + e_i(p_ij), where e_i interpolates linearly
between q_i . e[floor p] and q_i . e[floor p + 1].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cacheslide_agents.position.base import Unmoved


@dataclass(frozen=True)
class Contextual(Unmoved):
    """The position scheme of CoPE models: keys stay as they are wherever they move."""

    def cos_sin(
        self, positions: Tensor | npt.NDArray[np.int64], dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, Tensor]:
        """The rotation by no angle, [n, 1]: what a rotary layer applies without effect."""
        one = torch.ones_like(torch.as_tensor(positions), dtype=dtype)[..., None]
        return one, torch.zeros_like(one)


ROW_BLOCK = 64
FIRST_BAND = 256
"""Keys, counted back from a block's last row, that are scanned at first; doubled until every row of
the block has reached the last position. What lies further back stands at that position."""


@dataclass(frozen=True, eq=False)
class CanonicalMass:
    """CCPE: rows [first_row, last_row) count the keys [start, stop) as `mass` [heads] in sum.

    The mass is spread over those keys in proportion to their gates, so that positions stay
    non-negative and monotone. A row for which all of these gates are 0 counts nothing. A mass of
    npos - 1 means "that much or more": a row that counts as much anyway stays as it is.
    """

    start: int
    stop: int
    first_row: int
    last_row: int
    mass: Tensor


def contextual_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embedding: Tensor,
    rows: Tensor,
    *,
    scale: float,
    masses: Sequence[CanonicalMass] = (),
    seen: Tensor | None = None,
) -> Tensor:
    """Query rows [heads, n, head_dim] over keys and values [kv_heads, m, head_dim].

    `rows` [n], ascending, are the rows' own places among the keys: row i sees the keys up to
    `rows[i]`, and of those, if `seen` [n, m] is given, the ones it marks. `embedding` is
    [heads, npos, head_dim]. Returns [heads, n, head_dim]. Works for autograd; takes
    O(ROW_BLOCK x keys) memory per group of heads that share a key.
    """
    groups = query.shape[0] // key.shape[0]
    outputs = []
    for head, (keys, values) in enumerate(zip(key, value, strict=True)):
        heads = slice(head * groups, (head + 1) * groups)
        scan = _Scan(keys, values, embedding[heads], scale, _of_heads(masses, heads))
        blocks = [
            scan.block(query[heads, part], rows[part], None if seen is None else seen[part])
            for start in range(0, query.shape[1], ROW_BLOCK)
            for part in (slice(start, start + ROW_BLOCK),)
        ]
        outputs.append(torch.cat(blocks, dim=1))
    return torch.cat(outputs)


class _Scan:
    """The heads that share one key head; remembers how wide the last block's band had to be."""

    def __init__(
        self,
        keys: Tensor,
        values: Tensor,
        embedding: Tensor,
        scale: float,
        masses: Sequence[CanonicalMass],
    ) -> None:
        self._keys, self._values, self._embedding = keys, values, embedding
        self._scale, self._masses = scale, masses
        self._last = embedding.shape[1] - 1
        self._band = FIRST_BAND

    def block(self, query: Tensor, rows: Tensor, seen: Tensor | None) -> Tensor:
        """[group, b, head_dim] in and out."""
        count = int(rows[-1]) + 1
        query = query * self._scale
        embedded = query @ (self._embedding / self._scale).transpose(1, 2)
        scores, positions, hidden = self._near(query, rows, seen, count)
        band = scores.shape[-1]
        near = (scores + _interpolate(embedded, positions, self._last)).masked_fill(
            hidden, -torch.inf
        )
        if band == count:
            return torch.softmax(near, dim=-1) @ self._values[:count].flip(0)
        far = query @ self._keys[: count - band].T + embedded[..., -1:]
        if seen is not None:
            far = far.masked_fill(~seen[:, : count - band], -torch.inf)
        weights = torch.softmax(torch.cat((far, near), dim=-1), dim=-1)
        values, seam = self._values[:count], count - band
        beyond, within = weights[..., :seam], weights[..., seam:]
        return beyond @ values[:seam] + within @ values[seam:].flip(0)

    def _near(
        self, query: Tensor, rows: Tensor, seen: Tensor | None, count: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Scores, positions [group, b, band] and what is hidden [b, band], nearest key first.

        Counted from the row outwards, so that near positions, which matter most, are exact.
        """
        masses = self._counting(rows)
        reach = min(self._band, count)
        while True:
            band = _holding(masses, reach, count)
            places = torch.arange(count - 1, count - 1 - band, -1, device=rows.device)
            hidden = places > rows[:, None]
            if seen is not None:
                hidden = hidden | ~seen[:, count - band : count].flip(1)
            scores = query @ self._keys[count - band : count].flip(0).T
            gates = torch.sigmoid(scores).masked_fill(hidden, 0.0)
            for mass in masses:
                gates = _canonical(gates, mass, places, rows, self._last)
            positions = gates.cumsum(-1)
            # At least 1, which no row has counted unless it lies within the band itself.
            if band == count or bool((positions[..., -1] >= max(self._last, 1)).all()):
                self._band = max(FIRST_BAND, reach)
                return scores, positions.clamp(max=self._last), hidden
            reach = min(2 * band, count)

    def _counting(self, rows: Tensor) -> list[CanonicalMass]:
        """The masses that concern some of `rows`, those nearest to them first."""
        if not self._masses:
            return []
        first, last = int(rows[0]), int(rows[-1])
        found = [m for m in self._masses if m.first_row <= last and first < m.last_row]
        return sorted(found, key=lambda mass: -mass.stop)


def _interpolate(embedded: Tensor, positions: Tensor, last: int) -> Tensor:
    """`embedded` [group, b, npos] read off at `positions` [group, b, band]."""
    below = positions.detach().floor()
    index = below.long()
    low = embedded.gather(-1, index)
    high = embedded.gather(-1, (index + 1).clamp_(max=last))
    return torch.lerp(low, high, positions - below)


def _holding(masses: Sequence[CanonicalMass], band: int, count: int) -> int:
    """`band`, widened to hold the whole of every update that it reaches into."""
    for mass in masses:
        if mass.stop > count - band:
            band = max(band, count - mass.start)
    return band


def _canonical(
    gates: Tensor, mass: CanonicalMass, places: Tensor, rows: Tensor, last: int
) -> Tensor:
    inside = (places >= mass.start) & (places < mass.stop)
    total = (gates * inside).sum(-1, keepdim=True)
    wanted = mass.mass.to(gates)[:, None, None]
    counting = ((rows >= mass.first_row) & (rows < mass.last_row))[:, None]
    counting = counting & ~((wanted >= last) & (total >= last))
    # Divided first: a share is at most 1, where wanted / total may pass the range of float16.
    share = gates / total.clamp(min=torch.finfo(gates.dtype).tiny)
    return torch.where(inside & counting, share * wanted, gates)


def _of_heads(masses: Sequence[CanonicalMass], heads: slice) -> list[CanonicalMass]:
    return [
        CanonicalMass(each.start, each.stop, each.first_row, each.last_row, each.mass[heads])
        for each in masses
    ]
