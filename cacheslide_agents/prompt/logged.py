"""Requests as they stand in a log: one JSON object each.

In: a JSONL file, or one JSON object, ours or of OpenAI's chat API. Out: `LoggedRequest`s, or a
`DataError` that says where.

An object holds one of

- `messages` (and `tools`, formerly `functions`) as OpenAI's chat API takes them; also inside `body`
  (a batch file) or `request` (a gateway's log). A text block may carry two keys of ours: `chunk`,
  its chunk id, and `reuse`, the hint of its role;
- `template` and `values`: a packaged template's name and what it is rendered with;
- `prompt_ids` (and `spans`): tokens of the model at hand, as in a `GenerationRequest`.

Beside these it may hold `id`, `model`, `namespace`, `task`, `session` (or `session_id`, or `user`),
`retain` (false: the prompt is not kept for later requests), `measured` (false: it only prepares the
cache and counts in no total), and the answer: `output` (text), `output_ids` (tokens) or
`response` (the API's answer). All other keys are ignored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from cacheslide_agents.chunks import ChunkedPrompt, EncodedPrompt, Message, Role, Span
from cacheslide_agents.errors import DataError, PromptError
from cacheslide_agents.foreign_json import json_lines
from cacheslide_agents.prompt.auto import chunk_messages
from cacheslide_agents.prompt.template import PromptTemplate

T = TypeVar("T")
_WRAPPERS = ("body", "request")
MOST_ID = (1 << 31) - 1
"""Beyond every vocabulary, and small enough for arrays of 64-bit numbers."""


class Encoder(Protocol):
    """A `ChatEncoder`, or what stands in for one."""

    def encode(
        self, prompt: ChunkedPrompt, *, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> EncodedPrompt: ...


@dataclass(frozen=True)
class LoggedRequest:
    """`where` is its place for error messages. `prompt` is chunked text, or tokens already."""

    where: str
    id: str
    prompt: ChunkedPrompt | EncodedPrompt
    tools: tuple[Mapping[str, Any], ...] = ()
    model: str = ""
    namespace: str = "default"
    session: str | None = None
    retain: bool = True
    measured: bool = True
    output: str | tuple[int, ...] = ""

    @property
    def task(self) -> str:
        return self.prompt.task

    def encode(self, encoder: Encoder) -> EncodedPrompt:
        """Tokens of the prompt; `DataError` with the request's place if it cannot be encoded."""
        if isinstance(self.prompt, EncodedPrompt):
            return self.prompt
        try:
            return encoder.encode(self.prompt, tools=self.tools or None)
        except PromptError as error:
            raise DataError(f"{self.where}: {error}") from error


def read_trace(path: str | Path) -> Iterator[LoggedRequest]:
    """One request a line, read as it is asked for; `DataError` names the line that is wrong."""
    try:
        empty = True
        for where, record in json_lines(path):
            empty = False
            yield read_request(record, where)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: the trace cannot be read: {error}") from error
    if empty:
        raise DataError(f"{path} holds no requests")


def read_request(record: Any, where: str) -> LoggedRequest:
    """The request in JSON value `record`."""
    if not isinstance(record, Mapping):
        raise DataError(f"{where} must be a JSON object, not a {type(record).__name__}")
    inner = (record[key] for key in _WRAPPERS if isinstance(record.get(key), Mapping))
    fields = _Fields({**next(inner, {}), **record}, where)
    try:
        prompt, tools = _prompt(fields)
    except PromptError as error:
        raise DataError(f"{where}: {error}") from error
    return LoggedRequest(
        where=where,
        id=str(fields.get("id", (str, int)) or fields.get("custom_id", (str,)) or where),
        prompt=prompt,
        tools=tools,
        model=fields.get("model", (str,)) or "",
        namespace=fields.get("namespace", (str,)) or "default",
        session=_session(fields),
        retain=fields.get("retain", (bool,)) is not False,
        measured=fields.get("measured", (bool,)) is not False,
        output=_output(fields),
    )


def messages_record(prompt: ChunkedPrompt, **fields: Any) -> dict[str, Any]:
    """`prompt` as an object that `read_request` reads back; `fields` stand beside its messages."""
    messages = [
        {
            "role": message.role,
            "content": [
                {"type": "text", "text": c.text, "chunk": c.id, "reuse": c.role is Role.REUSE}
                for c in message.chunks
            ],
            **message.extra,
        }
        for message in prompt.messages
    ]
    return {**fields, "task": prompt.task, "messages": messages}


@dataclass(frozen=True)
class _Fields:
    values: Mapping[str, Any]
    where: str

    def get(self, name: str, kinds: tuple[type[T], ...]) -> T | None:
        """The value of `name`, `None` where it is missing or null."""
        value = self.values.get(name)
        if value is None or type(value) in kinds:  # a bool is no int here
            return value
        names = " or ".join(kind.__name__ for kind in kinds)
        raise DataError(f"{self.where}: {name!r} is a {type(value).__name__}; it must be a {names}")


def _prompt(
    fields: _Fields,
) -> tuple[ChunkedPrompt | EncodedPrompt, tuple[Mapping[str, Any], ...]]:
    given = [key for key in ("messages", "template", "prompt_ids") if key in fields.values]
    if len(given) != 1:
        raise DataError(
            f"{fields.where}: a request has either 'messages', 'template' or 'prompt_ids', "
            f"not {' and '.join(given) or 'none of them'}"
        )
    tools = tuple(fields.get("tools", (list,)) or _older_tools(fields))
    if given == ["prompt_ids"]:
        return _tokens(fields), ()
    if given == ["template"]:
        template = PromptTemplate.named(fields.get("template", (str,)) or "")
        rendered = template.render(**(fields.get("values", (dict,)) or {}))
        return replace(rendered, task=fields.get("task", (str,)) or rendered.task), tools
    messages = fields.get("messages", (list,)) or []
    prompt = chunk_messages(messages, task=fields.get("task", (str,)) or "default")
    named = tuple(map(_named, prompt.messages, messages))
    return ChunkedPrompt(named, prompt.task), tools


def _older_tools(fields: _Fields) -> list[dict[str, Any]]:
    """OpenAI's older form of `tools`, without their type."""
    functions = fields.get("functions", (list,)) or []
    return [{"type": "function", "function": function} for function in functions]


def _named(message: Message, given: Mapping[str, Any]) -> Message:
    """The message with the chunk ids and roles that its blocks carry."""
    blocks = given.get("content")
    if not isinstance(blocks, list):
        return message
    chunks = []
    for chunk, block in zip(message.chunks, blocks, strict=True):
        if isinstance(block, Mapping) and isinstance(block.get("chunk"), str):
            role = Role.REUSE if block.get("reuse") else Role.RECOMPUTE
            chunk = replace(chunk, id=block["chunk"], role=role)
        chunks.append(chunk)
    return replace(message, chunks=tuple(chunks))


def _tokens(fields: _Fields) -> EncodedPrompt:
    ids = _token_ids(fields, "prompt_ids")
    if not ids:
        raise DataError(f"{fields.where}: 'prompt_ids' is empty; give at least one token")
    spans = []
    for index, span in enumerate(fields.get("spans", (list,)) or ()):
        try:
            spans.append(_span(span))
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"{fields.where}: spans[{index}] must have id, role, start, stop and digest: "
                f"{error!r}"
            ) from error
    return EncodedPrompt(ids, tuple(spans), "", fields.get("task", (str,)) or "default")


def _span(given: Any) -> Span:
    start, stop, digest = given["start"], given["stop"], given["digest"]
    if type(start) is not int or type(stop) is not int or not isinstance(digest, str):
        raise ValueError("start and stop are whole numbers, digest is text")
    return Span(str(given["id"]), Role(given["role"]), start, stop, digest)


def _token_ids(fields: _Fields, name: str) -> tuple[int, ...]:
    ids = fields.get(name, (list,)) or []
    if not all(type(each) is int and 0 <= each <= MOST_ID for each in ids):
        raise DataError(
            f"{fields.where}: {name!r} must hold token ids only, whole numbers from 0 to {MOST_ID}"
        )
    return tuple(ids)


def _session(fields: _Fields) -> str | None:
    """One agent's run: our own name for it, then what other logs call it."""
    found = (fields.get(name, (str,)) for name in ("session", "session_id", "user"))
    return next((name for name in found if name), None)


def _output(fields: _Fields) -> str | tuple[int, ...]:
    if "output_ids" in fields.values:
        return _token_ids(fields, "output_ids")
    text = fields.get("output", (str,)) or _answered(fields.get("response", (dict,)) or {})
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{fields.where}: the answer is not Unicode ({error}); leave lone surrogates out"
        ) from error
    return text


def _answered(response: Any) -> str:
    """The text of the API's answer; what is no text is no answer."""
    response = response.get("body") or response
    try:
        content = response["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError):
        return ""
    blocks = content if isinstance(content, list) else [content]
    texts = (block.get("text") if isinstance(block, Mapping) else block for block in blocks)
    return "".join(text for text in texts if isinstance(text, str))
