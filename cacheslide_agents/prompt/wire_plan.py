"""The chunk plan of one request as it travels to a server: what the client knows of the seams.

In: a `ChunkedPrompt` (a plan in characters) or an `EncodedPrompt` (a plan in tokens). Out: a small
JSON object. The other way, JSON from a client nobody trusts in, a validated `WirePlan` out.

A plan holds no text. Its digest binds it to one prompt: a server that computes another digest from
the messages or ids it was sent drops the plan and answers without it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from cacheslide_agents.chunks import (
    ChunkedPrompt,
    EncodedPrompt,
    Role,
    not_unicode,
    text_digest,
)
from cacheslide_agents.errors import RequestError

PLAN_VERSION = 1
MOST_CHUNKS = 1024
LONGEST_NAME = 256
"""Characters of a chunk id, namespace, task, session or policy name."""

Unit = Literal["characters", "tokens"]
_DIGEST_LENGTH = 32
_LONGEST_CHUNK = 2**31
_VALUES = ("unit", "digest", "namespace", "task", "session", "policy")
_FIELDS = frozenset({"version", *_VALUES, "chunks"})


@dataclass(frozen=True, slots=True)
class PlannedChunk:
    """`length` characters or tokens, as the plan's unit says."""

    id: str
    role: Role
    length: int

    def __post_init__(self) -> None:
        _expect_name("chunk id", self.id)
        sensible = type(self.length) is int and 0 <= self.length < _LONGEST_CHUNK
        _expect(sensible, f"chunk {self.id!r:.40} has no sensible length")


@dataclass(frozen=True, slots=True)
class WirePlan:
    """Chunks that partition a prompt, in order, and whose cache they may use.

    In `characters` the chunks cut the messages' contents, end to end; `digest` is `digest_of_text`.
    In `tokens` they cut the rendered ids; `digest` is `digest_of_ids`. `policy=None` leaves the
    policy to the server. Raises `RequestError` for what a server must not accept.
    """

    unit: Unit
    digest: str
    chunks: tuple[PlannedChunk, ...]
    namespace: str = "default"
    task: str = "default"
    session: str | None = None
    policy: str | None = None

    def __post_init__(self) -> None:
        _expect(self.unit in get_args(Unit), f"its unit {self.unit!r:.40} is unknown")
        hexadecimal = isinstance(self.digest, str) and set(self.digest) <= set("0123456789abcdef")
        _expect(
            hexadecimal and len(self.digest) == _DIGEST_LENGTH,
            f"its digest must be {_DIGEST_LENGTH} hexadecimal digits",
        )
        _expect_count(len(self.chunks))
        _expect_name("namespace", self.namespace)
        _expect_name("task", self.task)
        for name, value in (("session", self.session), ("policy", self.policy)):
            if value is not None:
                _expect_name(name, value)
        ids = {chunk.id for chunk in self.chunks}
        _expect(len(ids) == len(self.chunks), "a chunk id appears twice")

    @property
    def length(self) -> int:
        """Characters or tokens of the whole prompt."""
        return sum(chunk.length for chunk in self.chunks)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; `read_plan` reads them back."""
        values = {name: getattr(self, name) for name in _VALUES}
        chunks = [[chunk.id, chunk.role.value, chunk.length] for chunk in self.chunks]
        return {"version": PLAN_VERSION, **values, "chunks": chunks}


def plan_of(
    prompt: ChunkedPrompt | EncodedPrompt,
    *,
    namespace: str = "default",
    session: str | None = None,
    policy: str | None = None,
) -> WirePlan:
    """The plan of `prompt`: in tokens if it is encoded, else in characters.

    Raises `RequestError` when the prompt has more than `MOST_CHUNKS` chunks, or a name is too long
    or not Unicode text.
    """
    unit: Unit = "characters"
    if isinstance(prompt, EncodedPrompt):
        unit, digest = "tokens", digest_of_ids(prompt.ids)
        chunks = tuple(PlannedChunk(span.id, span.role, len(span)) for span in prompt.spans)
    else:
        turns = [(message.role, message.content) for message in prompt.messages]
        digest = digest_of_text(turns)
        chunks = tuple(PlannedChunk(c.id, c.role, len(c.text)) for c in prompt.chunks())
    return WirePlan(unit, digest, chunks, namespace, prompt.task, session, policy)


def read_plan(given: Any) -> WirePlan:
    """The plan in a JSON value from the wire; `RequestError` says what is wrong with it."""
    _expect(isinstance(given, Mapping), "it is no JSON object")
    version = given.get("version")
    _expect(version == PLAN_VERSION, f"its version is {version!r:.40}, not {PLAN_VERSION}")
    unknown = sorted(map(str, set(given) - _FIELDS))
    _expect(not unknown, f"it has unknown fields: {', '.join(unknown):.200}")
    missing = sorted(_FIELDS - set(given))
    _expect(not missing, f"it lacks {', '.join(missing)}")
    rows = given["chunks"]
    _expect(isinstance(rows, list), "its chunks are no list")
    _expect_count(len(rows))
    values = {name: given[name] for name in _VALUES}
    return WirePlan(**values, chunks=tuple(map(_read_chunk, rows)))


def digest_of_text(turns: Sequence[tuple[str, str]]) -> str:
    """128-bit hex digest of (role, content) pairs; no pair can pass for two."""
    return text_digest(json.dumps([list(turn) for turn in turns], separators=(",", ":")))


def digest_of_ids(ids: Sequence[int]) -> str:
    """128-bit hex digest of token ids."""
    return text_digest(np.asarray(ids, dtype="<u4").tobytes().hex())


def _read_chunk(row: Any) -> PlannedChunk:
    _expect(isinstance(row, list) and len(row) == 3, "a chunk is no [id, role, length]")
    name, role, length = row
    _expect(isinstance(role, str) and role in tuple(Role), f"the role {role!r:.40} is unknown")
    return PlannedChunk(name, Role(role), length)


def _expect_count(chunks: int) -> None:
    _expect(chunks <= MOST_CHUNKS, f"it has {chunks} chunks; at most {MOST_CHUNKS} may be sent")


def _expect_name(what: str, value: Any) -> None:
    _expect(
        isinstance(value, str) and 0 < len(value) <= LONGEST_NAME,
        f"its {what} must be a string of 1 to {LONGEST_NAME} characters",
    )
    wrong = not_unicode(value)
    _expect(not wrong, f"its {what} {wrong}")


def _expect(holds: bool, problem: str) -> None:
    if not holds:
        raise RequestError(f"the chunk plan cannot be used: {problem}")
