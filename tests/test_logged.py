"""Requests of a log whose answers, tokens or chunks are not as they should be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cacheslide_agents.bench.replay import ReplayModel, predict, read_trace
from cacheslide_agents.cli.commands import app
from cacheslide_agents.errors import DataError
from cacheslide_agents.policies import CacheSlide
from cacheslide_agents.prompt.logged import MOST_ID, read_request

HELLO = [{"role": "user", "content": "Hello"}]
SPAN = {"id": "a", "role": "reuse", "start": 0, "stop": 3, "digest": "d"}


@pytest.mark.parametrize(
    ("content", "output"),
    [
        ([{"type": "text", "text": "Hi"}, {"type": "text", "text": "!"}], "Hi!"),
        ([{"type": "refusal", "refusal": "no"}, "Hi"], "Hi"),
        ([{"type": "text", "text": None}, 3, None], ""),
        (5, ""),
        ({"text": "Hi"}, "Hi"),
        (True, ""),
    ],
)
def test_the_text_of_an_answer_in_blocks_is_joined(content: Any, output: str) -> None:
    response = {"choices": [{"message": {"content": content}}]}
    assert read_request({"messages": HELLO, "response": response}, "log:1").output == output


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": HELLO, "output": "cut \ud83d"}, "the answer is not Unicode"),
        (
            {"messages": HELLO, "response": {"choices": [{"message": {"content": "\ud83d"}}]}},
            "the answer is not Unicode",
        ),
        ({"prompt_ids": [MOST_ID + 1]}, "'prompt_ids' must hold token ids only"),
        ({"prompt_ids": [1], "output_ids": [10**27]}, "'output_ids' must hold token ids only"),
        ({"prompt_ids": [1, 2, 3], "spans": [SPAN | {"start": 0.0}]}, r"spans\[0\] must have"),
        ({"prompt_ids": [1, 2, 3], "spans": [SPAN | {"stop": True}]}, r"spans\[0\] must have"),
        ({"prompt_ids": [1, 2, 3], "spans": [SPAN | {"digest": 5}]}, r"spans\[0\] must have"),
    ],
)
def test_what_cannot_be_used_is_named_with_its_line(fields: Any, message: str) -> None:
    with pytest.raises(DataError, match=f"^log:1: {message}"):
        read_request(fields, "log:1")
    assert read_request({"prompt_ids": [MOST_ID]}, "log:1")


def older(query: str) -> dict[str, Any]:
    """A request as OpenAI's API took it before it had tools."""
    call = {"name": "search", "arguments": json.dumps({"query": query})}
    asked = {"role": "assistant", "content": None, "function_call": call}
    told = {"role": "function", "name": "search", "content": "3 rivers"}
    schema = {"name": "search", "parameters": {"type": "object"}}
    return {"messages": [*HELLO, asked, told], "functions": [schema]}


def newer(query: str) -> dict[str, Any]:
    request = older(query)
    hello, asked, told = request["messages"]
    calls = [{"type": "function", "function": asked["function_call"]}]
    asked = {"role": "assistant", "content": None, "tool_calls": calls}
    tools = [{"type": "function", "function": schema} for schema in request["functions"]]
    return {"messages": [hello, asked, {**told, "role": "tool"}], "tools": tools}


def test_a_request_of_the_older_form_reads_as_one_of_the_newer(tiny_model: str) -> None:
    model = ReplayModel.read(Path(tiny_model))
    found, expected = (read_request(form("river"), "log:1") for form in (older, newer))
    assert (found.prompt, found.tools) == (expected.prompt, expected.tools)
    encoded = found.encode(model.encoder)
    assert '{"name": "search", "arguments": {"query": "river"}}' in encoded.text
    assert '"parameters": {"type": "object"}' in encoded.text
    (predicted,) = predict([found], model, {"x": CacheSlide()})
    assert predicted.prompt_tokens == len(encoded.ids)


def test_why_sees_a_difference_between_calls_of_the_older_form(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text("\n".join(json.dumps(older(query)) for query in ("river", "lake")))
    result = CliRunner().invoke(app, ["why", f"{log}:1", f"{log}:2", "--json"])
    assert json.loads(result.stdout)["difference"]["chunk"].startswith("call-")


def test_spans_that_leave_tokens_out_are_named_with_their_line(tiny_model: str) -> None:
    request = read_request({"prompt_ids": [1, 2, 3, 4], "spans": [SPAN]}, "log:7")
    with pytest.raises(DataError, match=r"^log:7: the spans end at token 3 of 4"):
        list(predict([request], ReplayModel.read(Path(tiny_model)), {"x": CacheSlide()}))


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    line = '{"messages": [{"role": "user", "content": "Hello there"}]}\n'
    log.write_text(line * 2, encoding="utf-8-sig")
    assert len(list(read_trace(log))) == 2
    result = CliRunner().invoke(app, ["why", f"{log}:1", f"{log}:2", "--json"])
    assert result.exit_code == 0
