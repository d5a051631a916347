"""Lines of a trace: what is read, what is refused and where; prices from a result file."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from cacheslide_agents.bench.replay import ReplayModel, read_prices, read_trace
from cacheslide_agents.bench.replay.prices import row_work
from cacheslide_agents.bench.replay.store import TokenStore
from cacheslide_agents.bench.results import Results, Row, write_json
from cacheslide_agents.bench.summary import summarise
from cacheslide_agents.chunks import ChunkedPrompt, EncodedPrompt, Role
from cacheslide_agents.cli.commands import app
from cacheslide_agents.errors import DataError, PageError, RequestError
from cacheslide_agents.pages.base import ContextKey, StoredContext
from cacheslide_agents.policies.work import Work
from cacheslide_agents.prompt.logged import LoggedRequest, read_request
from cacheslide_agents.prompt.words import WordEncoder

HELLO = [{"role": "user", "content": "Hello"}]
TOOL = {"type": "function", "function": {"name": "search", "parameters": {}}}


def read(**record: Any) -> LoggedRequest:
    return read_request(record, "log:1")


def test_a_chat_request_is_read_with_its_defaults() -> None:
    found = read(messages=HELLO, temperature=0.2, stream=True)
    assert isinstance(found.prompt, ChunkedPrompt)
    assert [message.content for message in found.prompt.messages] == ["Hello"]
    assert (found.id, found.model, found.namespace, found.task) == (
        "log:1",
        "",
        "default",
        "default",
    )
    assert (found.session, found.retain, found.measured, found.output) == (None, True, True, "")


@pytest.mark.parametrize("wrapper", ["body", "request"])
def test_a_wrapped_request_is_unwrapped(wrapper: str) -> None:
    inner = {"messages": HELLO, "model": "m", "tools": [TOOL], "user": "ann"}
    found = read(**{wrapper: inner}, custom_id="line-1")
    assert (found.id, found.model, found.session) == ("line-1", "m", "ann")
    assert "search" in found.encode(WordEncoder()).text


@pytest.mark.parametrize(
    ("fields", "session"),
    [
        ({"user": "u"}, "u"),
        ({"user": "u", "session_id": "s"}, "s"),
        ({"user": "u", "session_id": "s", "session": "ours"}, "ours"),
    ],
)
def test_the_session_is_ours_before_it_is_anybodys(fields: Any, session: str) -> None:
    assert read(messages=HELLO, **fields).session == session


@pytest.mark.parametrize(
    ("fields", "output"),
    [
        ({"output": "Hi."}, "Hi."),
        ({"output_ids": [4, 5]}, (4, 5)),
        ({"response": {"choices": [{"message": {"content": "Hi."}}]}}, "Hi."),
        ({"response": {"body": {"choices": [{"message": {"content": "Hi."}}]}}}, "Hi."),
        ({"response": {"choices": [{"message": {"content": None}}]}}, ""),
        ({"response": {"error": "busy"}}, ""),
    ],
)
def test_the_answer_is_taken_from_where_it_stands(fields: Any, output: Any) -> None:
    assert read(messages=HELLO, **fields).output == output


def test_a_template_line_is_rendered() -> None:
    values = {"examples": [], "reflections": [], "paragraphs": [], "question": "Who?"}
    found = read(template="reflexion", values=values)
    assert isinstance(found.prompt, ChunkedPrompt)
    assert found.task == "reflexion"
    assert [chunk.id for chunk in found.prompt.chunks()][2] == "reflections"
    assert read(template="reflexion", values=values, task="mine").task == "mine"


def test_a_line_of_tokens_is_taken_as_it_is() -> None:
    span = {"id": "a", "role": "reuse", "start": 0, "stop": 2, "digest": "d"}
    found = read(prompt_ids=[7, 8], spans=[span], task="t").encode(WordEncoder())
    assert isinstance(found, EncodedPrompt)
    assert (found.ids, found.task, found.spans[0].role) == ((7, 8), "t", Role.REUSE)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("3", "must be a JSON object, not a int"),
        ("{}", "not none of them"),
        ('{"messages": [], "prompt_ids": [1]}', "not messages and prompt_ids"),
        ('{"messages": 3}', "'messages' is a int; it must be a list"),
        ('{"messages": [{"role": "king", "content": "x"}]}', "message 0: unknown role 'king'"),
        (
            '{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
            "only text blocks",
        ),
        ('{"messages": [], "retain": 1}', "'retain' is a int; it must be a bool"),
        ('{"messages": [], "namespace": {}}', "'namespace' is a dict; it must be a str"),
        ('{"template": "none"}', "no packaged template of this name"),
        ('{"template": "reflexion"}', "is undefined"),
        ('{"prompt_ids": []}', "'prompt_ids' is empty"),
        ('{"prompt_ids": [1, "a"]}', "'prompt_ids' must hold token ids only"),
        ('{"prompt_ids": [true]}', "'prompt_ids' must hold token ids only"),
        ('{"prompt_ids": [1], "spans": [{"id": "a"}]}', "spans[0] must have id, role"),
        ('{"messages": [{"role": "user", "content": "x"}], "output_ids": [-1]}', "'output_ids'"),
    ],
)
def test_a_bad_line_is_named_by_its_number(line: str, message: str, tmp_path: Path) -> None:
    trace = tmp_path / "log.jsonl"
    trace.write_text(f"{json.dumps({'messages': HELLO})}\n\n{line}\n", encoding="utf-8")
    with pytest.raises(DataError) as caught:
        list(read_trace(trace))
    assert str(caught.value).startswith(f"{trace}:3")
    assert message in str(caught.value)


def test_a_prompt_that_cannot_be_encoded_is_named_by_its_line() -> None:
    with pytest.raises(DataError, match=r"log:1: .*a tool must look like"):
        read(messages=HELLO, tools=[{"name": "search"}]).encode(WordEncoder())


@pytest.mark.parametrize("content", [None, "", "\n\n", b"\xff\xfe"])
def test_a_trace_without_requests_is_an_error(content: Any, tmp_path: Path) -> None:
    trace = tmp_path / "log.jsonl"
    if content is not None:
        trace.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=r"holds no requests|cannot be read"):
        list(read_trace(trace))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give either TRACE, or --task with --data"),
        (["x.jsonl", "--task", "memgpt", "--data", "."], "give either TRACE"),
        (["--task", "memgpt"], "give either TRACE"),
        (["x.jsonl", "--prices", "p.json", "--calibrate"], "either --prices or --calibrate"),
        (["x.jsonl", "--policies", "best"], "no policy is named 'best'"),
        (["log.jsonl", "--dtype", "int3"], "dtype 'int3' is unknown"),
        (["x.jsonl"], "x.jsonl: the trace cannot be read"),
        (["log.jsonl", "--prices", "none.json"], "none.json cannot be read"),
    ],
)
def test_bad_usage_is_one_line_and_exit_code_2(
    arguments: list[str],
    message: str,
    tiny_model: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("log.jsonl").write_text('{"prompt_ids": [1], "namespace": "tests"}\n')
    result = CliRunner().invoke(app, ["replay", *arguments, "--model", tiny_model])
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in " ".join(result.stderr.split())


def test_a_bad_line_is_named_before_a_model_is_looked_for(tmp_path: Path) -> None:
    trace = tmp_path / "log.jsonl"
    trace.write_text('{"prompt_ids": [1]}\n{bad\n')
    result = CliRunner().invoke(app, ["replay", str(trace), "--model", "no/such-model"])
    assert result.exit_code == 2
    assert f"{trace}:2: not JSON" in " ".join(result.stderr.split())


def test_declined_requests_are_counted_by_reason(tmp_path: Path, tiny_model: str) -> None:
    same, change = list(range(10, 110)), 20  # forty tokens behind a change are not worth moving
    prompts = [[*same, *[new] * change, *same[:40]] for new in (3, 4)]
    trace = tmp_path / "log.jsonl"
    trace.write_text("".join(json.dumps({"prompt_ids": ids}) + "\n" for ids in prompts))
    arguments = ["replay", str(trace), "--model", tiny_model, "--policies", "cacheslide"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0
    assert "cacheslide declined 1 of its requests: prefix_cheaper" in result.stderr


def test_a_folder_without_a_decoder_config_is_an_error(tiny_model: str, tmp_path: Path) -> None:
    for file in Path(tiny_model).iterdir():
        if file.name.startswith("tokenizer"):
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(DataError, match=r"config\.json does not describe a decoder"):
        ReplayModel.read(tmp_path)
    (tmp_path / "config.json").write_text('{"num_attention_heads": 0}')
    with pytest.raises(DataError, match=r"config\.json does not describe a decoder"):
        ReplayModel.read(tmp_path)
    with pytest.raises(RequestError, match="unknown"):
        ReplayModel.read(tmp_path, "int4")


PASS_S, ROW_S, PAIR_S = 2e-3, 5e-6, 2e-9
"""Prices of a made-up machine."""


def row(policy: str, tokens: int, first: int, active: int) -> Row:
    """A measured row of a model with 4 layers on that machine."""
    start = tokens - active
    pairs = 4 * sum(range(start + 1, tokens + 1))
    return Row(
        id=f"{tokens}-{first}",
        turn=1,
        policy=policy,
        prompt_tokens=tokens,
        first_change=first,
        reused_tokens=tokens - active,
        active_tokens=active,
        compute_fraction=active / tokens,
        populate_s=0.0,
        ttft_s=PASS_S + ROW_S * 4 * active + PAIR_S * pairs,
        kl=0.0,
        top1=1.0,
        answer=None,
        f1=None,
        em=None,
        outcome="cold",
        reason="",
        bytes_written=0,
        peak_kv_bytes=0,
    )


ROWS = [
    row(policy, tokens, tokens // 4, tokens if policy == "recompute" else tokens - tokens // 4)
    for tokens in range(400, 3000, 200)
    for policy in ("recompute", "prefix")
]


def test_the_work_of_dense_and_prefix_rows_is_known_exactly() -> None:
    for one in ROWS:
        start = one.prompt_tokens - one.active_tokens
        plain = Work.of(np.arange(start, one.prompt_tokens), 4)
        found = row_work(one, 4)
        assert (found.rows, found.pairs) == pytest.approx((plain.rows, plain.pairs))
        assert (found.loaded, found.selecting) == (4 * start, 0)


@pytest.mark.usefixtures("learnt_prices")
def test_prices_of_a_result_file_predict_rows_that_are_not_in_it(
    tiny_model: str, tmp_path: Path
) -> None:
    model = ReplayModel.read(Path(tiny_model))
    dear = [replace(one, policy="epic", ttft_s=99.0) for one in ROWS if one.policy == "prefix"]
    rows = (*ROWS, *dear)
    results = Results("t", "m", "torch", "cpu", 1, {}, rows, summarise(rows))
    write_json(tmp_path / "run.json", results.to_dict())
    basis = read_prices(tmp_path / "run.json", model, ("prefix", "cacheslide"))
    assert basis.observations == len(ROWS)
    assert basis.median_error < 0.05
    unseen = row("recompute", 3500, 0, 3500)
    assert model.cost.predict(row_work(unseen, 4)) == pytest.approx(unseen.ttft_s, rel=0.15)


def test_a_result_file_of_fallbacks_gives_no_prices(tiny_model: str, tmp_path: Path) -> None:
    fallen = [Row(**{**asdict(one), "outcome": "fallback"}) for one in ROWS[:2]]
    results = Results("t", "m", "torch", "cpu", 1, {}, tuple(fallen), summarise(fallen))
    write_json(tmp_path / "run.json", results.to_dict())
    with pytest.raises(DataError, match="no row that a price"):
        read_prices(tmp_path / "run.json", ReplayModel.read(Path(tiny_model)), ("prefix",))


def context(*ids: int, session: str | None = None, isolated: bool = False) -> StoredContext:
    tokens = np.array(ids, dtype=np.int64)
    exact = np.ones(len(tokens), dtype=np.bool_)
    return StoredContext(KEY, tokens, exact, session=session, isolated=isolated)


KEY = ContextKey("model", "tenant", "task")


def test_a_token_store_finds_the_session_first_then_the_newest() -> None:
    store = TokenStore(100)
    for one in (context(1, session="a"), context(2, session="b"), context(3)):
        assert store.put(one)
    assert [found.ids.tolist() for found in store.find(KEY, "a")] == [[1], [3], [2]]
    assert store.find(ContextKey("model", "other", "task")) == []


def test_a_token_store_bounds_copies_of_a_text_and_of_a_session() -> None:
    store = TokenStore(100, copies_per_session=2)
    for _ in range(4):
        store.put(context(1, 2))
    for number in (5, 6, 7):
        store.put(context(number, session="a"))
    assert [found.ids.tolist() for found in store.find(KEY)] == [[7], [6], [1, 2], [1, 2]]


def test_a_token_store_drops_what_was_not_used_for_longest() -> None:
    store = TokenStore(4)
    old, used = context(1, 1), context(2, 2)
    store.put(old)
    store.put(used)
    store.touch(old)
    store.put(context(3))
    assert [found.ids.tolist() for found in store.find(KEY)] == [[3], [1, 1]]
    assert not store.put(context(1, 2, 3, 4, 5))
    assert not store.put(context())
    assert store.tokens == 3


def test_a_token_store_keeps_chunks_alone_apart_and_has_no_keys() -> None:
    store = TokenStore(10)
    store.put(context(1, 2, isolated=True))
    assert store.find(KEY) == []
    found = store.find_isolated(KEY, np.array([1, 2]))
    assert found is not None
    assert store.find_isolated(KEY, np.array([1, 3])) is None
    with pytest.raises(PageError, match="knows tokens only"):
        store.load(found, 0)
