"""A log of what a model answers, made as it answers.

In: prompts, a backend. Out: a JSONL file as `prompt/logged.py` reads it. A run that was ended goes
on where it stopped.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from cacheslide_agents.answered import answered
from cacheslide_agents.backend import Backend, GenerationRequest, Sampling
from cacheslide_agents.bench.asked import Asked
from cacheslide_agents.errors import DataError
from cacheslide_agents.foreign_json import json_lines
from cacheslide_agents.policies import Recompute
from cacheslide_agents.prompt.chat import ChatEncoder
from cacheslide_agents.prompt.logged import messages_record
from cacheslide_agents.weights.writing import writing

MEND = "choose another --out"


def record(backend: Backend, prompts: Iterable[Asked], out: Path, max_tokens: int) -> Iterator[str]:
    """Answer densely and greedily, at most `max_tokens` each; yields the id of each that is there.

    `DataError` where `out` holds something else, or answers of another model.
    """
    lines = _known(out, backend.model_id)
    encode = ChatEncoder(backend.tokenizer).encode
    for each in prompts:
        if each.id not in lines:
            request = GenerationRequest.of(
                encode(each.prompt),
                sampling=Sampling(max_tokens=max_tokens),
                policy=Recompute(),
                retain=False,
            )
            answer = answered(backend, request)
            lines[each.id] = messages_record(
                each.prompt,
                id=each.id,
                model=backend.model_id,
                output=answer.text,
                output_ids=answer.token_ids,
            )
            _write(out, lines.values())
        yield each.id


def _write(out: Path, lines: Iterable[dict[str, Any]]) -> None:
    """All of them or, at any moment, what was there before."""
    part = out.with_name(f"{out.name}.part")
    with writing(out, MEND):
        text = "".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines)
        part.write_text(text, encoding="utf-8")
        part.replace(out)


def _known(out: Path, model: str) -> dict[str, dict[str, Any]]:
    """The lines in the file, by id."""
    if not out.exists():
        return {}
    try:
        return {line["id"]: line for line in _checked(out, model)}
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{out} cannot be read ({error}); {MEND}") from error


def _checked(out: Path, model: str) -> Iterator[dict[str, Any]]:
    for where, found in json_lines(out):
        if not isinstance(found, dict) or not isinstance(found.get("id"), str):
            raise DataError(f"{where} is no record of an answer; {MEND}")
        if found.get("model") != model:
            raise DataError(
                f"{where} is an answer of {found.get('model')!r}, not of {model!r}; {MEND}"
            )
        yield found
