"""`why`: the first difference, what prefix caching and alignment reuse, and the advice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from cacheslide_agents.chunks import EncodedPrompt
from cacheslide_agents.cli.commands import app
from cacheslide_agents.prompt.auto import chunk_messages
from cacheslide_agents.prompt.chat import ChatEncoder
from cacheslide_agents.prompt.compare import compare
from cacheslide_agents.prompt.words import WordEncoder, encode_rendered

STABLE = " ".join(f"Sentence {word} stays as it was." for word in "abcdefghijklmnopqrstuvwxyz")


def encoded(*texts: str) -> EncodedPrompt:
    messages = [{"role": "user", "content": [{"type": "text", "text": text} for text in texts]}]
    return WordEncoder().encode(chunk_messages(messages))


def common_head(a: EncodedPrompt, b: EncodedPrompt) -> int:
    pairs = enumerate(zip(a.ids, b.ids, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a.ids), len(b.ids)))


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["why", *arguments])


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write(name: str, content: Any) -> str:
        path = tmp_path / name
        text = content if isinstance(content, str) else json.dumps(content)
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


def test_words_and_their_spans_partition_the_text() -> None:
    prompt = encoded("Hello, Ann!\n", "How are you?")
    assert prompt.text == "user\nHello, Ann!\nHow are you?\n\nassistant\n"
    assert prompt.ends[-1] == len(prompt.text)
    assert [span.start for span in prompt.spans[1:]] == [span.stop for span in prompt.spans[:-1]]
    assert prompt.spans[-1].stop == len(prompt.ids)
    again = encoded("How are you?")
    assert set(prompt.ids) & set(again.ids) == set(again.ids)


def test_a_rendered_text_is_cut_at_blank_lines() -> None:
    prompt = encode_rendered("One\ntwo.\n\nThree.\n\n\nFour.")
    pieces = [prompt.text[prompt.ends[s.start - 1] if s.start else 0 :][:6] for s in prompt.spans]
    assert pieces == ["One\ntw", "Three.", "Four."]
    assert prompt.spans[-1].stop == len(prompt.ids) == len(prompt.ends)


def test_tokens_end_where_the_chat_encoder_says(smollm2_tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "Grüße aus Köln, 🙂!"}]
    prompt = ChatEncoder(smollm2_tokenizer).encode(chunk_messages(messages))
    assert len(prompt.ends) == len(prompt.ids)
    for token, end in enumerate(prompt.ends, start=1):
        said = smollm2_tokenizer.decode(prompt.ids[:token]).rstrip("\ufffd")
        assert prompt.text[:end].startswith(said)
    assert prompt.ends[-1] == len(prompt.text)


def test_counts_are_those_of_the_common_head_and_of_what_is_equal_behind_the_change() -> None:
    old, new = encoded("Ann lives in Oslo. ", STABLE), encoded("Ann has moved to Lima. ", STABLE)
    found = compare(old, new, min_run=1)
    assert found.prefix == common_head(old, new)
    changed = len(new.ids) - found.aligned
    assert 0 < changed <= 2 * 4  # words, and the spaces between them
    assert found.verdict == "align"
    assert f"reuses {found.prefix} of {found.tokens} tokens" in found.advice


def test_the_first_difference_is_shown_with_the_text_around_it() -> None:
    old, new = encoded("Ann lives in Oslo. ", STABLE), encoded("Ann lives in Lima. ", STABLE)
    change = compare(old, new).difference
    assert change is not None
    assert change.token == common_head(old, new)
    assert change.chunk == new.spans[0].id
    assert change.line == 2
    assert change.shared.endswith("Ann lives in ")
    assert change.was.startswith("Oslo. ")
    assert change.now.startswith("Lima. ")


def test_fields_that_change_by_themselves_are_worth_moving() -> None:
    old = encoded("It is 2024-03-04 09:30, step 3. ", STABLE)
    new = encoded("It is 2024-03-05 17:02, step 4. ", STABLE)
    found = compare(old, new)
    assert found.verdict == "move"
    assert [(one.kind, one.was, one.now) for one in found.fields] == [
        ("time stamp", "2024-03-04 09:30", "2024-03-05 17:02"),
        ("counter", "3", "4"),
    ]
    moved = encoded("It is , step . ", STABLE)
    assert abs(found.prefix_if_moved - len(moved.ids)) <= 4
    assert "Move the time stamp and counter behind the stable text" in found.advice


def test_moving_fields_is_no_remedy_where_the_text_changed_as_well() -> None:
    old = encoded("It is 09:30. ", "Ann lives in Oslo, by the sea. ", STABLE)
    new = encoded("It is 10:45. ", "Ann lives in Lima, by the sea. ", STABLE)
    found = compare(old, new, min_run=4)
    assert found.verdict == "align"
    assert found.prefix < found.prefix_if_moved < found.aligned
    assert "Moving the time alone would raise it" in found.advice


def test_prefix_caching_does_as_well_where_text_is_only_appended() -> None:
    old, new = encoded(STABLE), encoded(STABLE, " And a new question, which nobody asked before?")
    found = compare(old, new)
    assert found.verdict == "prefix"
    assert found.prefix == common_head(old, new)


def test_equal_prompts_have_no_difference() -> None:
    found = compare(encoded(STABLE), encoded(STABLE))
    assert (found.verdict, found.difference, found.fields) == ("equal", None, ())
    assert found.prefix == found.aligned == found.tokens


def test_every_chunk_says_what_became_of_it() -> None:
    head, tail, gone = STABLE, STABLE.upper(), STABLE.replace("stays", "went")
    old, new = encoded(head, gone, tail), encoded(head, "Something new. ", tail)
    found = compare(old, new)
    states = [(one.state, one.kept == one.tokens) for one in found.segments]
    assert states == [
        ("kept", True),
        ("new", False),
        ("moved", True),
        ("moved", True),  # the cue for the answer
        ("removed", False),
    ]
    less = len(new.ids) - len(old.ids)
    assert [one.shift for one in found.segments] == [0, None, less, less, None]
    assert found.segments[1].begins == "Something new. "


def test_template_with_two_value_files(write: Any) -> None:
    values = {"examples": [], "paragraphs": [{"title": "T", "text": STABLE}], "question": "Who?"}
    old = write("old.json", {**values, "reflections": []})
    new = write("new.json", {**values, "reflections": ["Look twice."]})
    found = json.loads(run(old, new, "--template", "reflexion", "--json").stdout)
    assert found["tokenizer"] == "words and marks"
    assert found["difference"]["chunk"] == "reflections"
    states = {one["id"]: one["state"] for one in found["segments"]}
    assert states == {
        "instruction": "kept",
        "examples": "kept",
        "reflections": "changed",
        "context": "moved",
        "cue": "moved",
        "generation-prompt": "moved",
    }
    table = run(old, new, "--template", "reflexion")
    assert "First difference: token" in table.stdout
    assert found["advice"] in table.stdout.replace("\n", " ")
    assert "role" in table.stdout


def test_roles_are_shown_only_where_an_author_gave_them(write: Any) -> None:
    text = write("a.txt", STABLE)
    shown = run(text, text).stdout
    assert "state" in shown
    assert "role" not in shown


def test_two_lines_of_a_log_are_compared(write: Any) -> None:
    system = {"role": "system", "content": f"Session sess_1a2b3c4d. {STABLE}"}
    other = {"role": "system", "content": f"Session sess_9z8y7x6w. {STABLE}"}
    hello = {"role": "user", "content": "Hello"}
    lines = [
        {"messages": [system, hello]},
        {"body": {"messages": [other, hello]}, "custom_id": "b"},
    ]
    log = write("log.jsonl", "\n".join(map(json.dumps, lines)))
    found = json.loads(run(f"{log}:1", f"{log}:2", "--json").stdout)
    assert found["verdict"] == "move"
    assert [field["kind"] for field in found["fields"]] == ["id"]


def test_messages_requests_and_rendered_text_may_be_files(
    write: Any, tiny_model: str, smollm2_tokenizer: Any
) -> None:
    messages = [{"role": "user", "content": STABLE}]
    plain = write("messages.json", messages)
    request = write("request.json", {"messages": messages})
    counted = json.loads(run(plain, request, "--json", "--model", tiny_model).stdout)
    assert (counted["tokenizer"], counted["verdict"]) == (tiny_model, "equal")
    rendered = f"<|im_start|>user\n{STABLE}<|im_end|>\n<|im_start|>assistant\n"
    text = write("prompt.txt", rendered)
    tokens = json.loads(run(text, text, "--json", "--model", tiny_model).stdout)["tokens"]
    assert tokens == len(smollm2_tokenizer(rendered).input_ids)


def test_a_mistral_prompt_is_text_although_it_begins_with_a_bracket(write: Any) -> None:
    text = write("prompt.txt", f"[INST] {STABLE} [/INST]")
    assert json.loads(run(text, text, "--json").stdout)["verdict"] == "equal"


@pytest.mark.parametrize(
    ("content", "source", "message"),
    [
        (None, "none.txt", "none.txt: the prompt cannot be read: No such file"),
        ("", "empty.txt", "empty.txt is empty; give a file that holds a prompt"),
        ('{"a": 1}\n{"b": 2}', "two.jsonl", "two.jsonl holds 2 requests; say which, as in"),
        ('{"messages": []}\n{"b": 2', "torn.jsonl", "torn.jsonl:2: not JSON"),
        ('{"a": 1}', "other.json", "has either 'messages', 'template' or 'prompt_ids'"),
        ('{"a": 1}\n{"b": 2}', "two.jsonl:9", "two.jsonl has no request on line 9"),
        ('{"prompt_ids": [1, 2]}', "ids.json", "tokens alone cannot be explained"),
        ('[{"role": "king", "content": "x"}]', "role.json", "unknown role 'king'"),
        ("[1]", "list.json", "a message is a mapping with role and content"),
    ],
)
def test_bad_input_is_one_line_that_names_the_file(
    write: Any, tmp_path: Path, content: str | None, source: str, message: str
) -> None:
    if content is not None:
        write(source.partition(":")[0], content)
    good = write("good.txt", STABLE)
    result = run(str(tmp_path / source), good)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
