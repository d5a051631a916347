"""The four input files of the workloads, as typed records.

In: a folder with `hotpotqa/dev.jsonl`, `hotpotqa/reflexion_dev.jsonl`, `msc/dev.jsonl` and
`swe_agent/dev.jsonl`. Out: frozen records in file order, or `DataError` with file and line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from cacheslide_agents.chunks import not_unicode
from cacheslide_agents.errors import DataError
from cacheslide_agents.foreign_json import json_lines

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Paragraph:
    title: str
    text: str


@dataclass(frozen=True, slots=True)
class HotpotQuestion:
    id: str
    question: str
    answer: str
    paragraphs: tuple[Paragraph, ...]
    supporting_titles: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Trial:
    """One attempt; `reflections` are what the agent knew before it."""

    trial: int
    reflections: tuple[str, ...]
    trajectory: str


@dataclass(frozen=True, slots=True)
class ReflexionRun:
    id: str
    hotpotqa_id: str
    trials: tuple[Trial, ...]


@dataclass(frozen=True, slots=True)
class Utterance:
    """`fact` is what the turn tells about its speaker, if anything."""

    speaker: str
    text: str
    fact: str | None


@dataclass(frozen=True, slots=True)
class Dialogue:
    """`memory` holds facts known of each speaker beforehand, where turns carry none."""

    id: str
    sessions: tuple[tuple[Utterance, ...], ...]
    memory: tuple[tuple[str, ...], ...]
    questions: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class AgentMessage:
    """`tool_calls` are (name, arguments) pairs; arguments are JSON text as the model wrote them."""

    role: str
    content: str
    tool_calls: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Trajectory:
    """`issue` is the problem statement; `messages` start with the system and the task text."""

    id: str
    issue: str
    messages: tuple[AgentMessage, ...]


def hotpot_questions(path: Path) -> list[HotpotQuestion]:
    return _read(path, _hotpot_question)


def reflexion_runs(path: Path) -> list[ReflexionRun]:
    return _read(path, _reflexion_run)


def dialogues(path: Path) -> list[Dialogue]:
    return _read(path, _dialogue)


def trajectories(path: Path) -> list[Trajectory]:
    return _read(path, _trajectory)


def texts(path: Path) -> list[str]:
    return _read(path, lambda record: record.get("text", str))


@dataclass(frozen=True, slots=True)
class Record:
    """A JSON object with the place it was read from, for error messages."""

    values: Mapping[str, Any]
    where: str

    def get(self, name: str, kind: type[T]) -> T:
        value = self.values.get(name)
        if not isinstance(value, kind):
            found = "missing" if name not in self.values else f"a {type(value).__name__}"
            raise DataError(f"{self.where}: {name!r} is {found}; it must be a {kind.__name__}")
        self._check_text(name, value)
        return value

    def _check_text(self, name: str, value: Any) -> None:
        if isinstance(value, str) and (wrong := not_unicode(value)):
            raise DataError(f"{self.where}: {name!r} {wrong}")

    def optional(self, name: str, kind: type[T], default: T) -> T:
        return default if self.values.get(name) is None else self.get(name, kind)

    def items(self, name: str) -> Iterator[Record]:
        for i, value in enumerate(self.get(name, list)):
            yield Record(_object(value, f"{self.where}: {name}[{i}]"), f"{self.where}: {name}[{i}]")

    def strings(self, name: str, default: tuple[str, ...] | None = None) -> tuple[str, ...]:
        values = self.get(name, list) if default is None else self.optional(name, list, [*default])
        if not all(isinstance(value, str) for value in values):
            raise DataError(f"{self.where}: {name!r} must hold strings only")
        for value in values:
            self._check_text(name, value)
        return tuple(values)


def _object(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f"{where} must be a JSON object, not a {type(value).__name__}")
    return value


def _read(path: Path, parse: Callable[[Record], T]) -> list[T]:
    try:
        records = [parse(_record(value, where)) for where, value in json_lines(path)]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path} cannot be read ({error}); the data folder must hold hotpotqa/, msc/, "
            "swe_agent/ and text/ with their .jsonl files"
        ) from error
    if not records:
        raise DataError(f"{path} holds no records")
    return records


def _record(value: Any, where: str) -> Record:
    return Record(_object(value, where), where)


def _hotpot_question(record: Record) -> HotpotQuestion:
    return HotpotQuestion(
        id=record.get("id", str),
        question=record.get("question", str),
        answer=record.get("answer", str),
        paragraphs=tuple(
            Paragraph(item.get("title", str), item.get("text", str))
            for item in record.items("paragraphs")
        ),
        supporting_titles=record.strings("supporting_titles", ()),
    )


def _reflexion_run(record: Record) -> ReflexionRun:
    return ReflexionRun(
        id=record.get("id", str),
        hotpotqa_id=record.get("hotpotqa_id", str),
        trials=tuple(
            Trial(item.get("trial", int), item.strings("reflections"), item.get("trajectory", str))
            for item in record.items("trials")
        ),
    )


def _dialogue(record: Record) -> Dialogue:
    sessions = []
    for i, session in enumerate(record.get("sessions", list)):
        turns = Record({"turns": session}, f"{record.where}: sessions[{i}]")
        sessions.append(tuple(_utterance(turn) for turn in turns.items("turns")))
    return Dialogue(
        id=record.get("id", str),
        sessions=tuple(sessions),
        memory=_known_facts(record),
        questions=tuple(
            (item.get("question", str), item.get("answer", str))
            for item in record.items("questions")
        ),
    )


def _known_facts(record: Record) -> tuple[tuple[str, ...], ...]:
    by_speaker = record.optional("memory", list, [])
    return tuple(Record({"memory": facts}, record.where).strings("memory") for facts in by_speaker)


def _utterance(turn: Record) -> Utterance:
    fact = turn.optional("fact", str, "")
    return Utterance(turn.get("speaker", str), turn.get("text", str), fact or None)


def _trajectory(record: Record) -> Trajectory:
    return Trajectory(
        id=record.get("id", str),
        issue=record.get("problem_statement", str),
        messages=tuple(_message(item) for item in record.items("messages")),
    )


def _message(item: Record) -> AgentMessage:
    calls = item.optional("tool_calls", list, [])
    return AgentMessage(
        role=item.get("role", str),
        content=item.optional("content", str, ""),
        tool_calls=tuple(
            (call.get("name", str), call.get("arguments", str))
            for call in Record({"tool_calls": calls}, item.where).items("tool_calls")
        ),
    )
