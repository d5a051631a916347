"""What the index knows of an extent and of a context, and how that is spelt in SQLite.

In: extents and contexts. Out: the values of their rows, and back.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from cacheslide_agents.chunks import Role, Span
from cacheslide_agents.pages.base import ContextKey, StoredContext
from cacheslide_agents.pages.block import Place
from cacheslide_agents.pages.extents import Sums, extent_bytes
from cacheslide_agents.pages.geometry import Geometry


@dataclass(frozen=True)
class ExtentRow:
    TABLE: ClassVar = "extents"
    FIELDS: ClassVar = ("number", "geometry", "blocks", "sums")

    number: int
    geometry: Geometry
    sums: Sums

    @property
    def blocks(self) -> int:
        return int(self.sums.shape[1])

    @property
    def nbytes(self) -> int:
        """Of the file."""
        return extent_bytes(self.geometry, self.blocks)

    def values(self) -> list[Any]:
        sums = self.sums.astype("<u8")
        return [self.number, self.geometry.to_json(), self.blocks, sums.tobytes()]

    @classmethod
    def read(cls, _: int, number: int, geometry: str, blocks: int, sums: bytes) -> Self:
        shape = Geometry.from_json(geometry)
        table = np.frombuffer(sums, dtype="<u8").reshape(shape.layers, blocks)
        return cls(number, shape, table.astype(np.uint64))


@dataclass(frozen=True)
class ContextRow:
    """Token i is row `row_of[i]` of the block at `places[block_of[i]]`. `arrived` orders them."""

    TABLE: ClassVar = "contexts"
    FIELDS: ClassVar = ("told", "ids", "exact", "places", "block_of", "row_of")

    context: StoredContext
    geometry: Geometry
    places: tuple[Place, ...]
    block_of: npt.NDArray[np.int64]
    row_of: npt.NDArray[np.int64]
    arrived: int
    row: int | None = None

    def values(self) -> list[Any]:
        """Names go through JSON, which can spell whatever a caller made up, lone surrogates too."""
        context = self.context
        told = {
            "key": list(astuple(context.key)),
            "session": context.session,
            "isolated": context.isolated,
            "created": float(context.created),
            "arrived": self.arrived,
            "geometry": self.geometry.to_json(),
            "spans": [[s.id, s.role.value, s.start, s.stop, s.digest] for s in context.spans],
        }
        return [
            json.dumps(told),
            np.asarray(context.ids, dtype="<i8").tobytes(),
            np.asarray(context.exact, dtype=np.uint8).tobytes(),
            np.array(self.places, dtype="<i8").tobytes(),
            self.block_of.astype("<u4").tobytes(),
            self.row_of.astype("u1").tobytes(),
        ]

    @classmethod
    def read(
        cls,
        row: int,
        told: str,
        ids: bytes,
        exact: bytes,
        places: bytes,
        block_of: bytes,
        row_of: bytes,
    ) -> Self:
        facts = json.loads(told)
        context = StoredContext(
            key=ContextKey(*facts["key"]),
            ids=np.frombuffer(ids, dtype="<i8").astype(np.int64),
            exact=np.frombuffer(exact, dtype=np.uint8).astype(np.bool_),
            spans=tuple(Span(i, Role(r), a, b, d) for i, r, a, b, d in facts["spans"]),
            session=facts["session"],
            isolated=facts["isolated"],
            created=facts["created"],
        )
        pairs = np.frombuffer(places, dtype="<i8").reshape(-1, 2).tolist()
        return cls(
            context,
            Geometry.from_json(facts["geometry"]),
            tuple(Place(extent, position) for extent, position in pairs),
            np.frombuffer(block_of, dtype="<u4").astype(np.int64),
            np.frombuffer(row_of, dtype="u1").astype(np.int64),
            facts["arrived"],
            row,
        )


def digest_of(values: Iterable[Any]) -> bytes:
    import xxhash  # only files need it

    hashed = xxhash.xxh3_128()
    for value in values:
        data = value if isinstance(value, bytes) else repr(value).encode("utf-8", "surrogatepass")
        hashed.update(b"%d:" % len(data))
        hashed.update(data)
    return hashed.digest()
