"""Prompts as a command line names them.

In: a file of JSON, JSON lines or plain text, with `:N` for line N of a log. Out: an encoded prompt.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cacheslide_agents.chunks import EncodedPrompt
from cacheslide_agents.cli.templates import find_template, read_values
from cacheslide_agents.errors import DataError
from cacheslide_agents.foreign_json import parsed
from cacheslide_agents.prompt.chat import ChatEncoder
from cacheslide_agents.prompt.logged import LoggedRequest, read_request
from cacheslide_agents.prompt.words import WordEncoder, encode_rendered

_LINE = re.compile(r"(?P<path>.+):(?P<line>\d+)")


@dataclass(frozen=True)
class PromptReader:
    """Encodes with the fast `tokenizer`, or in words where it is `None`."""

    tokenizer: Any | None = None

    def prompt(self, source: str) -> EncodedPrompt:
        """A rendered prompt (text), a list of messages, a logged request, or line N of a log."""
        path, line = _place(source)
        text = _text(path)
        if not text.strip():
            raise DataError(f"{path} is empty; give a file that holds a prompt")
        records = list(_records(text, path))
        if line is not None:
            return self._request(_on_line(records, path, line))
        if not records:
            return encode_rendered(text, self.tokenizer)
        if len(records) > 1:
            raise DataError(
                f"{path} holds {len(records)} requests; say which, as in {path}:{records[0][0]}"
            )
        _, record = records[0]
        if isinstance(record, list):
            record = {"messages": record}
        return self._request(read_request(record, source))

    def rendered(self, template: str, values: str) -> EncodedPrompt:
        """A template with the values of a JSON file."""
        prompt = find_template(template).render(**read_values(values))
        return self._request(LoggedRequest(values, values, prompt))

    def _request(self, request: LoggedRequest) -> EncodedPrompt:
        encoded = request.encode(
            WordEncoder() if self.tokenizer is None else ChatEncoder(self.tokenizer)
        )
        if not encoded.ends:
            raise DataError(
                f"{request.where}: tokens alone cannot be explained; log the messages as well"
            )
        return encoded


def _place(source: str) -> tuple[Path, int | None]:
    found = None if Path(source).is_file() else _LINE.fullmatch(source)
    return (Path(found["path"]), int(found["line"])) if found else (Path(source), None)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{path}: the prompt cannot be read: {reason}") from error


def _records(text: str, path: Path) -> Iterator[tuple[int, Any]]:
    """(line, value) of one JSON value, or of every line of a JSONL file; nothing of plain text."""
    if not text.lstrip().startswith(("{", "[")):
        return
    try:
        yield 1, json.loads(text)
        return
    except (ValueError, RecursionError):
        pass
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                record = parsed(line, f"{path}:{number}")
            except DataError:
                if number == 1 and path.suffix not in {".json", ".jsonl"}:
                    return
                raise
            yield number, record


def _on_line(records: list[tuple[int, Any]], path: Path, line: int) -> LoggedRequest:
    found = dict(records)
    if line not in found:
        raise DataError(f"{path} has no request on line {line}")
    return read_request(found[line], f"{path}:{line}")
