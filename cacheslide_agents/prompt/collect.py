"""The template tags, and the collector that turns one rendering into chunked messages.

In: what Jinja evaluates between `{% reuse id %}`, `{% recompute id %}`, `{% message role %}` and
their end tags. Out: `Message`s in the order they were rendered.

Chunk texts never travel through the rendered text. Each tag hands its text to the collector and
leaves a marker with an unguessable nonce behind, so no value can open or close a chunk or a
message, and a marker that was lost, copied or moved by the template is noticed.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import NoReturn

from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from cacheslide_agents.chunks import Chunk, Message, Role
from cacheslide_agents.errors import TemplateError
from cacheslide_agents.prompt.ids import UniqueIds

MESSAGE_ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class Tag:
    """Where a tag stands: its name (`reuse`, `recompute`, `message`), file and line."""

    name: str
    path: str
    line: int

    def fail(self, message: str) -> NoReturn:
        raise TemplateError(message, path=self.path, line=self.line)


@dataclass(slots=True)
class Collector:
    """The chunks and messages of one rendering, so far."""

    nonce: str = field(default_factory=lambda: secrets.token_hex(16))
    messages: list[Message] = field(default_factory=list)
    _chunks: list[tuple[Tag, Chunk]] = field(default_factory=list)
    _ids: dict[str, Tag] = field(default_factory=dict)
    _message: Tag | None = None
    _chunk: str | None = None
    _loose: int = 0

    def chunk(self, tag: Tag, chunk_id: object, body: Callable[[], str]) -> str:
        """Store one chunk; returns the marker that holds its place in the message."""
        name = _identifier(tag, chunk_id)
        if self._message is None:
            tag.fail(f"chunk {name!r} stands outside a message; put it in {{% message %}}")
        if self._chunk is not None:
            tag.fail(f"chunk {name!r} stands inside chunk {self._chunk!r}; close that one first")
        if name in self._ids:
            first = self._ids[name]
            tag.fail(f"chunk id {name!r} is used twice, first at {first.path}:{first.line}")
        self._ids[name] = tag
        self._chunk = name
        text = body()
        self._chunk = None
        self._chunks.append((tag, Chunk(name, text, Role(tag.name))))
        return f"{self.nonce}:{len(self._chunks) - 1};"

    def message(self, tag: Tag, role: object, body: Callable[[], str]) -> str:
        """Store one message; returns the marker that holds its place in the conversation."""
        if role not in MESSAGE_ROLES:
            tag.fail(f"unknown message role {role!r}; use one of {', '.join(MESSAGE_ROLES)}")
        if self._message is not None:
            tag.fail(f"a message stands inside the message of line {self._message.line}")
        self._message = tag
        first = len(self._chunks)
        content = body()
        self._message = None
        chunks = list(self._placed(tag, content, first))
        self.messages.append(Message(str(role), tuple(chunks)))
        return f"{self.nonce}:{len(self.messages) - 1};"

    def _placed(self, tag: Tag, content: str, first: int) -> Iterator[Chunk]:
        """The message's own chunks, and between them the text that stands in no tag."""
        parts = self._split(content)
        expected = [str(index) for index in range(first, len(self._chunks))]
        if parts[1::2] != expected:
            tag.fail("a chunk was captured, filtered or printed twice; leave its tag in place")
        for index, part in enumerate(parts):
            if index % 2:
                yield self._chunks[int(part)][1]
            elif part:
                self._loose += 1
                yield Chunk(f"{self.nonce}:{self._loose}", part, Role.RECOMPUTE)

    def _split(self, text: str) -> list[str]:
        return re.split(rf"{self.nonce}:(\d+);", text)

    def finish(self, text: str, path: str) -> tuple[Message, ...]:
        """The messages, after checking that `text` holds nothing but their markers."""
        parts = self._split(text)
        if parts[1::2] != [str(index) for index in range(len(self.messages))]:
            raise TemplateError("a message was captured, filtered or printed twice", path=path)
        loose = "".join(parts[::2]).strip()
        if loose:
            raise TemplateError(
                f"text outside a message: {loose[:40]!r}; put it in {{% message %}}", path=path
            )
        if not self.messages:
            raise TemplateError("the template rendered no message", path=path)
        ids = UniqueIds(self._ids)
        return tuple(self._named(message, ids) for message in self.messages)

    def _named(self, message: Message, ids: UniqueIds) -> Message:
        """Untagged text gets its public id (`text-1`, ...) once all the author's are known."""
        chunks = []
        for chunk in message.chunks:
            prefix, _, number = chunk.id.partition(":")
            name = ids.new(f"text-{number}") if prefix == self.nonce else chunk.id
            chunks.append(Chunk(name, chunk.text, chunk.role))
        return Message(message.role, tuple(chunks))


def _identifier(tag: Tag, value: object) -> str:
    name = str(value)
    if not isinstance(value, str | int) or not name.strip():
        tag.fail(f"a chunk id must be a non-empty string, not {value!r}")
    return name


_current: ContextVar[Collector] = ContextVar("cacheslide_collector")


@contextmanager
def collecting() -> Iterator[Collector]:
    """The collector of the rendering that runs inside; per thread and per asyncio task.

    A context variable, because Jinja gives imported macros no access to the render context.
    """
    collector = Collector()
    token = _current.set(collector)
    try:
        yield collector
    finally:
        _current.reset(token)


class ChunkTags(Extension):
    """`{% reuse id %}`, `{% recompute id %}` and `{% message role %}`, each with an end tag."""

    tags = {Role.REUSE.value, Role.RECOMPUTE.value, "message"}  # noqa: RUF012 (as Jinja declares it)

    def parse(self, parser: Parser) -> nodes.Node:
        token = next(parser.stream)
        if parser.stream.current.type == "block_end":
            what = "a role" if token.value == "message" else "an id"
            parser.fail(f"{{% {token.value} %}} needs {what}", token.lineno)
        argument = parser.parse_expression()
        body = parser.parse_statements((f"name:end{token.value}",), drop_needle=True)
        path = parser.filename or parser.name or "<string>"
        place = [nodes.Const(value) for value in (token.value, path, token.lineno)]
        call = self.call_method("collect", [argument, *place], lineno=token.lineno)
        return nodes.CallBlock(call, [], [], body).set_lineno(token.lineno)

    def collect(
        self, argument: object, name: str, path: str, line: int, caller: Callable[[], str]
    ) -> str:
        collector = _current.get()
        store = collector.message if name == "message" else collector.chunk
        return store(Tag(name, path, line), argument, caller)
