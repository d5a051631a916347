"""The answers study: which questions it asks and how, its figures, and that a run goes on."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterator
from math import comb
from operator import itemgetter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from cacheslide_agents.backend import GenerationChunk, GenerationRequest, Sampling
from cacheslide_agents.bench import run_study
from cacheslide_agents.bench.answer_report import answers_markdown, answers_table
from cacheslide_agents.bench.bootstrap import mean_interval
from cacheslide_agents.bench.metrics import first_line, token_f1
from cacheslide_agents.bench.results import read_json, write_json
from cacheslide_agents.bench.runner import token_limits
from cacheslide_agents.bench.studies.answer_turns import (
    ANSWER_TOKENS,
    REFLECTION,
    answer_drafts,
    interleaved,
)
from cacheslide_agents.bench.studies.answers import Asking
from cacheslide_agents.bench.workloads import Turn
from cacheslide_agents.chunks import ChunkedPrompt
from cacheslide_agents.errors import DataError
from cacheslide_agents.policies import CacheSlide, Policy, Recompute
from cacheslide_agents.prompt.chat import ChatEncoder
from torch_cacheslide import TorchBackend


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, support: Callable[[str], ModuleType]) -> Path:
    folder: Path = support("tiny_data").write_tiny_data(tmp_path_factory.mktemp("data"))
    return folder


@pytest.fixture(scope="module")
def backend(tiny_model: str) -> Iterator[TorchBackend]:
    backend = TorchBackend(tiny_model, device="cpu")
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def turns(data: Path, backend: TorchBackend) -> dict[str, list[Turn]]:
    limits = token_limits(backend, ChatEncoder(backend.tokenizer).encode, 4096)
    built = {
        task: [draft.build() for draft in drafts]
        for task, drafts in answer_drafts(data, limits, 0).items()
    }
    return {task: [turn for turn in some if turn] for task, some in built.items()}


def changed_chunks(turn: Turn) -> set[str]:
    old, new = ({c.id: c.text for c in p.chunks()} for p in (turn.populate, turn.measure))
    return {name for name in old.keys() | new.keys() if old.get(name) != new.get(name)}


def text_of(prompt: ChunkedPrompt) -> str:
    return "\n".join(message.content for message in prompt.messages)


def test_every_question_is_asked_once(turns: dict[str, list[Turn]]) -> None:
    assert sorted(turn.id for turn in turns["reflexion"]) == sorted(f"q{n}" for n in range(11))
    assert sorted(turn.id for turn in turns["memgpt"]) == ["short:1", "talk:1", "talk:2"]


def test_a_hotpotqa_question_gains_its_recorded_reflections_or_ours(
    turns: dict[str, list[Turn]],
) -> None:
    for turn in turns["reflexion"]:
        lesson = "Look twice." if turn.id == "q0" else REFLECTION
        assert changed_chunks(turn) == {"reflections"}
        assert lesson in text_of(turn.measure) and lesson not in text_of(turn.populate)
        assert "Ask." not in text_of(turn.measure)


def test_no_worked_example_gives_the_answer_away(turns: dict[str, list[Turn]]) -> None:
    for turn in turns["reflexion"]:
        assert f"Answer: {turn.answers[0]}\n" not in text_of(turn.measure)


def test_a_dialogue_learns_one_fact_and_is_shown_even_if_it_is_short(
    turns: dict[str, list[Turn]],
) -> None:
    by_id = {turn.id: turn for turn in turns["memgpt"]}
    assert changed_chunks(by_id["talk:1"]) >= {"memory"}
    assert "question" not in changed_chunks(by_id["talk:1"])
    assert "I rest." in text_of(by_id["short:1"].measure)
    assert "I rest." not in text_of(by_id["short:1"].populate)


def test_the_first_rows_of_any_run_hold_every_task_in_its_share() -> None:
    def turn(task: str, number: int) -> Turn:
        return Turn(f"{number}", 1, task, ChunkedPrompt(()), ChunkedPrompt(()))

    turns = {task: [turn(task, n) for n in range(count)] for task, count in (("a", 6), ("b", 3))}
    order = [(one.task, one.id) for one in interleaved(turns)]
    for task, some in turns.items():
        assert [key for key in order if key[0] == task] == [(task, one.id) for one in some]
    for start in (0, 3, 6):
        assert [task for task, _ in order[start : start + 3]].count("a") == 2


def test_questions_that_are_too_long_are_left_out_and_counted(
    data: Path, backend: TorchBackend
) -> None:
    with pytest.raises(DataError, match="raise --max-prompt-tokens"):
        run_study("answers", data=data, backend=backend, max_prompt_tokens=50)


def test_the_interval_of_shares_is_that_of_the_binomial_distribution() -> None:
    """The mean of n rows drawn from zeros and ones is binomial; its quantiles are known."""
    n, ones = 60, 9
    low, high = mean_interval([1.0] * ones + [0.0] * (n - ones), resamples=20_000)
    p = ones / n
    mass = [comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(n + 1)]

    def quantile(level: float) -> float:
        return next(k for k in range(n + 1) if sum(mass[: k + 1]) >= level) / n

    assert low == pytest.approx(quantile(0.025), abs=1.01 / n)
    assert high == pytest.approx(quantile(0.975), abs=1.01 / n)


def test_the_interval_follows_scale_shift_and_seed() -> None:
    values = [0.3, -0.1, 0.0, 0.7, 0.2]
    low, high = mean_interval(values, seed=3)
    assert mean_interval(values, seed=3) == (low, high)
    moved = mean_interval([2 * v + 1 for v in values], seed=3)
    assert list(moved) == pytest.approx([2 * low + 1, 2 * high + 1])
    assert mean_interval([0.25] * 4) == (0.25, 0.25)
    wide = mean_interval(values, level=0.99, seed=3)
    assert wide[0] <= low < high <= wide[1]
    with pytest.raises(DataError, match="at least one row"):
        mean_interval([])


def alone(backend: TorchBackend, turn: Turn, policy: Policy, namespace: str) -> str:
    """What a policy answers to a turn, outside the study."""
    encode = ChatEncoder(backend.tokenizer).encode
    before, prompt = encode(turn.populate), encode(turn.measure)

    def request(ids: tuple[int, ...], spans: Any, policy: Policy) -> GenerationRequest:
        return GenerationRequest(
            ids,
            spans,
            namespace=namespace,
            task=turn.task,
            sampling=Sampling(max_tokens=ANSWER_TOKENS),
            policy=policy,
            retain=False,
        )

    backend.warm(request(before.ids, before.spans, policy))
    chunks = backend.generate(request(prompt.ids, prompt.spans, policy))
    return first_line("".join(chunk.text for chunk in chunks))


def test_a_row_holds_the_dense_answer_and_that_on_the_turn_before(
    backend: TorchBackend, turns: dict[str, list[Turn]]
) -> None:
    """Also where the dense prompt's head was taken from another question's dense context."""
    policy = CacheSlide(may_decline=False)  # which depends on times
    asking = Asking(backend, ChatEncoder(backend.tokenizer).encode, policy)
    for number, turn in enumerate(turns["reflexion"][:2]):
        before = backend.metrics().get("reused_tokens", 0)
        row = asking.both_ways(turn)
        shared = backend.metrics()["reused_tokens"] - before - row["reused_tokens"]
        assert row["dense"] == alone(backend, turn, Recompute(), f"recompute-{number}")
        assert row["reuse"] == alone(backend, turn, policy, f"slide-{number}")
        assert row["changed"] == (row["dense"] != row["reuse"])
        assert row["f1_dense"] == token_f1(row["dense"], turn.answers)
        assert row["outcome"] in ("hit", "partial") and row["reused_tokens"] > 0
        assert shared > 100 if number else shared == 0


class Recorder:
    """A fake backend that notes what is warmed beside what is asked."""

    def __init__(self, fake: Any) -> None:
        self.fake = fake
        self.seen: list[tuple[str, GenerationRequest]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.fake, name)

    def warm(self, request: GenerationRequest) -> None:
        self.seen.append(("warm", request))

    def generate(self, request: GenerationRequest) -> Generator[GenerationChunk, None, None]:
        self.seen.append(("generate", request))
        yield from self.fake.generate(request)


@pytest.fixture
def recorder(support: Callable[[str], ModuleType]) -> Recorder:
    """Every first answer of a question is the dense one; it is right for mill 3 only."""
    fake = support("fake_backend").FakeBackend(max_model_len=40_000, reused=5)
    fake.says = ("the Brook 3\nAnd more.",)
    return Recorder(fake)


def test_earlier_turns_and_dense_contexts_never_meet(recorder: Recorder, data: Path) -> None:
    run_study("answers", data=data, backend=recorder, max_prompt_tokens=30_000)
    rows = [recorder.seen[n : n + 3] for n in range(0, len(recorder.seen), 3)]
    assert len(rows) == 14
    for (kind, warmed), (_, dense), (_, reuse) in rows:
        assert kind == "warm" and warmed.retain and not reuse.retain
        assert warmed.namespace == reuse.namespace != dense.namespace
        assert [r.policy.name for r in (warmed, dense, reuse) if r.policy] == [
            *("prefix", "prefix", "cacheslide")
        ]
        assert dense.prompt_ids == reuse.prompt_ids != warmed.prompt_ids
        assert dense.sampling == Sampling(max_tokens=24)


def test_answers_are_scored_by_their_first_line_and_msc_is_not_quoted(
    recorder: Recorder, data: Path, tmp_path: Path
) -> None:
    out = tmp_path / "answers.json"
    found = run_study("answers", data=data, backend=recorder, out=out, max_prompt_tokens=30_000)
    by_id = {row["id"]: row for row in found["rows"]}
    right = by_id["q3"]
    assert (right["dense"], right["f1_dense"], right["em_reuse"]) == ("the Brook 3", 1.0, 1.0)
    assert by_id["q4"]["f1_reuse"] == pytest.approx(0.5)  # "brook" of "brook 4"
    assert by_id["q4"]["em_reuse"] == 0.0
    quoted = {row["task"] for row in found["rows"] if {"dense", "reuse"} & row.keys()}
    assert quoted == {"reflexion"}
    assert {type(value) for row in found["rows"] for value in row.values()} <= {
        *(str, int, float, bool)
    }
    reflexion, memgpt = found["points"]
    assert (reflexion["n"], reflexion["questions"], reflexion["partial"]) == (11, 11, 11)
    assert reflexion["f1_dense"] == pytest.approx((1.0 + 10 * 0.5) / 11)
    assert (memgpt["n"], memgpt["changed"]) == (3, 0.0)
    assert read_json(out) == found


def row(task: str, number: int, dense: float, reuse: float, outcome: str) -> dict[str, Any]:
    scores = {"f1_dense": dense, "f1_reuse": reuse}
    exact = {"em_dense": float(dense == 1.0), "em_reuse": float(reuse == 1.0)}
    own = {"changed": dense != reuse, "outcome": outcome, "reason": "", "compute_fraction": 0.25}
    return {"task": task, "id": f"q{number}", **scores, **exact, **own}


def test_points_are_paired_over_all_rows_and_a_finished_run_asks_nothing(
    recorder: Recorder, data: Path, tmp_path: Path
) -> None:
    outcomes = ["hit"] * 7 + ["partial", "declined", "fallback", "cold"]
    reuse = [1.0, 0.5, 0.0, 0.25, *[0.5] * 7]
    rows = [
        row("reflexion", number, 0.5, score, outcome)
        for number, (score, outcome) in enumerate(zip(reuse, outcomes, strict=True))
    ]
    rows += [row("memgpt", 0, 1.0, 1.0, "hit") | {"id": name} for name in MSC]
    out = tmp_path / "answers.json"
    write_json(out, {"schema": 1, "study": "answers", **ABOUT, "rows": rows})
    options: dict[str, Any] = {"data": data, "backend": recorder, "max_prompt_tokens": 30_000}
    found = run_study("answers", **options, out=out, resume=True)
    assert recorder.seen == []
    point, other = found["points"]
    differences = [0.5, 0.0, -0.5, -0.25, *[0.0] * 7]
    assert point["f1_difference"] == pytest.approx(-0.25 / 11)
    assert (point["f1_dense"], point["em_reuse"]) == (0.5, pytest.approx(1 / 11))
    # in the order of the run, which the seed decides; the interval hardly depends on it
    assert (point["f1_low"], point["f1_high"]) == pytest.approx(
        mean_interval(differences), abs=0.02
    )
    assert point["changed"] == pytest.approx(3 / 11)
    counts = {name: point[name] for name in ("hit", "partial", "declined", "fallback", "cold")}
    assert counts == {"hit": 7, "partial": 1, "declined": 1, "fallback": 1, "cold": 1}
    assert (other["f1_low"], other["f1_high"], other["n"]) == (0.0, 0.0, 3)
    lines = answers_markdown(found).splitlines()
    assert len(lines) == 2 + 4 and answers_table(found).row_count == 4
    assert "| reflexion | 11/11 | F1 | 0.500 |" in lines[2] and "1 fallback" in lines[2]
    with pytest.raises(DataError, match="needs a file of"):
        answers_table({"study": "answers", "points": []})


MSC = ("talk:1", "talk:2", "short:1")
ABOUT = {
    "model": "fake-model",
    "policy": "cacheslide",
    "answer_tokens": 24,
    "max_prompt_tokens": 30_000,
}


def test_a_run_goes_on_where_it_stopped_and_loses_no_row(
    recorder: Recorder, data: Path, tmp_path: Path
) -> None:
    out = tmp_path / "answers.json"
    options: dict[str, Any] = {"data": data, "backend": recorder, "max_prompt_tokens": 30_000}
    first = run_study("answers", **options, out=out, limit=2)
    assert [point["n"] for point in first["points"]] == [2, 2]
    kept = [one | {"reason": "kept"} for one in first["rows"]]
    write_json(out, first | {"rows": kept})
    recorder.seen.clear()
    whole = run_study("answers", **options, out=out, resume=True)
    found = [one for one in whole["rows"] if one["reason"] == "kept"]
    assert sorted(found, key=itemgetter("id")) == sorted(kept, key=itemgetter("id"))
    assert len(whole["rows"]) == 14
    assert len(recorder.seen) == 3 * (14 - len(kept))
    again = run_study("answers", **options)
    unmarked = [one | {"reason": ""} for one in whole["rows"]]
    assert (again["rows"], again["points"]) == (unmarked, whole["points"])
    for task in ("reflexion", "memgpt"):  # a shorter run asks the first questions of a longer one
        ids, few = ([one["id"] for one in rows if one["task"] == task] for rows in (unmarked, kept))
        assert ids[:2] == few


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (ABOUT | {"model": "other", "rows": []}, "the file's model is 'other'"),
        (ABOUT | {"max_prompt_tokens": 10}, "max_prompt_tokens is 10, not 30000"),
        (ABOUT | {"rows": [{"task": "reflexion", "id": "q1"}]}, "are malformed"),
        (ABOUT | {"rows": ["q1"]}, "are malformed"),
    ],
)
def test_a_run_is_resumed_from_its_own_file_only(
    recorder: Recorder, data: Path, tmp_path: Path, content: dict[str, Any], message: str
) -> None:
    out = tmp_path / "answers.json"
    out.write_text(json.dumps({"schema": 1, "study": "answers", **content}))
    options: dict[str, Any] = {"data": data, "backend": recorder, "max_prompt_tokens": 30_000}
    with pytest.raises(DataError, match=message):
        run_study("answers", **options, out=out, resume=True)
    assert recorder.seen == []
