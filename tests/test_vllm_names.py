"""Names that no encoding can carry, and annotations that cannot be read: nobody waits, nothing is
shared that should not be."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from cacheslide_agents.backend import GenerationRequest, Sampling
from cacheslide_agents.errors import RequestError
from cacheslide_agents.policies import CacheSlide
from cacheslide_agents.policies.cost import CostModel
from cacheslide_agents.prompt.wire_plan import WirePlan, digest_of_ids
from vllm_cacheslide.binding import Binding
from vllm_cacheslide.wire import MOST_TEXT, PARAMETER, Annotation

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),  # vLLM's and its packages' own
]

BROKEN = "ab\ud800"
IDS = list(range(2, 42))


@pytest.fixture(autouse=True)
def installed(support: Callable[[str], ModuleType]) -> None:
    if missing := support("vllm_engines").MISSING:
        pytest.skip(missing)


class Engine:
    """Counts a request as its own before it sends it, as vLLM's does; says one word for each."""

    def __init__(self) -> None:
        self.known: list[str] = []
        self.refusal: Exception | None = None
        self.cannot_abort = False
        self.engine_core = SimpleNamespace(shutdown=lambda: None)

    def add_request(self, id_: str, prompt: Any, params: Any) -> None:
        self.known.append(id_)
        if self.refusal is not None:
            raise self.refusal

    def abort_request(self, ids: list[str]) -> None:
        self.known = [each for each in self.known if each not in ids]
        if self.cannot_abort:
            raise UnicodeEncodeError("utf-8", BROKEN, 2, 3, "surrogates not allowed")

    def has_unfinished_requests(self) -> bool:
        return bool(self.known)

    def step(self) -> list[Any]:
        assert self.refusal is None, "a request that was never sent is waited for"
        told = [SimpleNamespace(request_id=each, finished=True) for each in self.known]
        self.known = []
        return told


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.mark.parametrize("cannot_abort", [False, True])
def test_what_cannot_be_sent_to_the_engine_is_forgotten(engine: Engine, cannot_abort: bool) -> None:
    from vllm_cacheslide.engine import EngineThread

    thread = EngineThread(lambda: engine)
    engine.refusal, engine.cannot_abort = ValueError("cannot be sent"), cannot_abort
    with pytest.raises(RequestError, match=r"^vLLM refuses the request: cannot be sent$"):
        list(thread.stream("a", IDS, SimpleNamespace()))
    assert thread.call(lambda each: each.known) == []
    engine.refusal = None
    told = list(thread.stream("b", IDS, SimpleNamespace()))
    assert [each.request_id for each in told] == ["b-1"]
    thread.close()
    assert not thread._thread.is_alive()


def test_an_engine_that_died_is_told_to_everybody_who_waits(engine: Engine) -> None:
    from vllm.v1.engine.exceptions import EngineDeadError

    from vllm_cacheslide.engine import EngineThread

    thread = EngineThread(lambda: engine)
    engine.refusal = EngineDeadError()
    with pytest.raises(EngineDeadError):
        list(thread.stream("a", IDS, SimpleNamespace()))
    thread._thread.join(60)
    assert not thread._thread.is_alive()


@pytest.mark.parametrize("answers", [1, 2])
def test_a_request_that_cannot_travel_leaves_the_engine_answering(
    lab: ModuleType, answers: int
) -> None:
    backend = lab.engine("outside")
    asked = lab.request(
        IDS, CacheSlide(), namespace="n", stop=(BROKEN,), n=answers, temperature=1.0
    )
    with pytest.raises(RequestError, match=r"vLLM refuses the request: .*surrogates not allowed"):
        lab.ask(backend, asked)
    assert not backend._thread.call(lambda engine: engine.has_unfinished_requests())
    answer = lab.ask(backend, lab.request(IDS, CacheSlide(), namespace="n"))
    assert len(answer.tokens) == lab.TOKENS


def test_settings_that_vllm_refuses_are_a_request_error() -> None:
    from vllm_cacheslide.params import sampling_params

    with pytest.raises(RequestError, match=r"^vLLM refuses the request: n must be 1 when using gr"):
        sampling_params(Sampling(n=2), None, 9, {})


def test_only_names_that_can_be_sent_are_pinned(lab: ModuleType) -> None:
    backend = lab.engine("outside")
    for act in (backend.pin, backend.release):
        with pytest.raises(RequestError, match="session is not Unicode text"):
            act(BROKEN)
        with pytest.raises(RequestError, match="namespace is not Unicode text"):
            act("s", BROKEN)
        act("s", "n")


class Request:
    """What the scheduler's side reads and writes of vLLM's request."""

    def __init__(self, **changes: Any) -> None:
        annotation = Annotation.of(GenerationRequest(IDS, request_id="r"), CacheSlide())
        body = {**annotation.to_params()[PARAMETER], **changes}
        self.request_id = "engine"
        self.kv_transfer_params: Any = {PARAMETER: body}
        self.prompt_token_ids: list[int] | None = list(IDS)
        self.sampling_params = None
        self.cache_salt: str | None = None
        self.block_hashes = ["unsalted"]

    def update_block_hashes(self) -> None:
        self.block_hashes.append(f"salted with {self.cache_salt}")

    @property
    def is_apart(self) -> bool:
        salted = self.cache_salt is not None and self.cache_salt.startswith("cacheslide-")
        return salted and self.block_hashes == [f"salted with {self.cache_salt}"]


@pytest.fixture
def side() -> Any:
    from vllm_cacheslide.planning import Planning
    from vllm_cacheslide.scheduling import Scheduling

    sizes = {"layers": 2, "hidden": 32, "intermediate": 64, "heads": 4, "kv_heads": 2}
    cost = CostModel.from_geometry(**sizes, head_dim=8)
    return Scheduling(Planning(cost, "model", ""), step_rows=100)


def arrived(side: Any, **changes: Any) -> Request:
    request = Request(**changes)
    side.arrived(request)
    return request


def test_namespaces_that_no_encoding_can_carry_are_kept_apart(side: Any) -> None:
    """With the engine in this process they get here as they are."""
    one, again, other = (arrived(side, namespace=name) for name in (BROKEN, BROKEN, "ab\ud801"))
    assert one.is_apart
    assert other.is_apart
    assert one.cache_salt == again.cache_salt != other.cache_salt
    assert side.matched(one, 0) == 0
    side.admitted(one, (1,), 0)
    assert side.take_orders().notes[0].order.plan.outcome == "cold"


def test_no_namespace_passes_for_another_with_a_salt_of_the_clients(side: Any) -> None:
    one, other = Request(namespace="a\0b"), Request(namespace="a")
    other.cache_salt = "b\0"
    for request in (one, other):
        side.arrived(request)
    assert one.is_apart
    assert one.cache_salt != other.cache_salt


@pytest.mark.parametrize(
    "changes",
    [
        {"namespace": "x" * (MOST_TEXT + 1)},
        {"namespace": None},
        {"policy": {"type": "Popen"}},
        {"spans": 5},
        {"spans": [[{}, "reuse", 0, 1, ""]], "digest": digest_of_ids(IDS)},
    ],
)
def test_blocks_of_an_annotation_that_cannot_be_read_are_nobody_elses(
    side: Any, changes: dict[str, Any]
) -> None:
    one, other = arrived(side, **changes), arrived(side, **changes)
    assert one.is_apart
    assert other.is_apart
    assert one.cache_salt != other.cache_salt
    assert not side.finished(one, (1,))


@pytest.mark.parametrize("step", ["_sibling", "_salt_of_namespace"])
def test_trouble_in_planning_leaves_no_request_unsalted(
    side: Any, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("trouble")

    monkeypatch.setattr(side, step, fails)
    assert arrived(side, namespace="a").is_apart
    assert side._planned == {}


def test_an_annotated_prompt_without_token_ids_is_kept_apart(side: Any) -> None:
    request = Request(namespace="a")
    request.prompt_token_ids = None
    side.arrived(request)
    assert request.is_apart


def test_what_bears_no_stamp_is_vllms_own(side: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side, "_stamp", "secret")
    forged = arrived(side, namespace="a")
    assert (forged.cache_salt, forged.block_hashes) == (None, ["unsalted"])


def binding() -> Binding:
    return Binding("no tokenizer", CacheSlide(), window=64)


def plan(**changes: Any) -> dict[str, Any]:
    return {**WirePlan("tokens", digest_of_ids(IDS), ()).to_dict(), **changes}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"namespace": BROKEN}, r"its namespace is not Unicode text: lone surrogate '\ud800'"),
        ({"task": BROKEN}, r"its task is not Unicode text: lone surrogate '\ud800'"),
        ({"session": BROKEN}, r"its session is not Unicode text: lone surrogate '\ud800'"),
        ({"policy": BROKEN}, r"its policy is not Unicode text: lone surrogate '\ud800'"),
        ({"chunks": [[BROKEN, "reuse", 40]]}, r"its chunk id is not Unicode text: lone"),
        ({"x\ud800": 1}, r"unknown fields: x\ud800"),
        ({"unit": BROKEN}, r"its unit 'ab\ud800' is unknown"),
    ],
)
def test_a_plan_that_cannot_be_sent_is_dropped_with_a_reason_that_can(
    changes: dict[str, Any], reason: str
) -> None:
    body = {"kv_transfer_params": {PARAMETER: json.loads(json.dumps(plan(**changes)))}}
    made = binding().annotate(body, "tenant", "tenant/id")
    assert reason in made.dropped
    assert (made.namespace, made.spans) == ("tenant", ())
    json.dumps(made.to_params(), ensure_ascii=False).encode()


@pytest.mark.parametrize(
    ("header", "given", "kept"),
    [
        ("", "mine ~1", True),
        ("", "ü→", False),
        ("", "ü", False),
        ("", BROKEN, False),
        ("", "a\r\nSet-Cookie: b", False),
        ("", "x" * 257, False),
        ("", 5, False),
        ("", None, False),
        ("of-header", "of-body", False),
        ("ü", "of-body", False),
    ],
)
def test_a_request_is_named_by_its_client_where_a_header_can_say_it(
    header: str, given: Any, kept: bool
) -> None:
    """The receipt is asked for under the name that vLLM answers with."""
    from starlette.datastructures import MutableHeaders

    from vllm_cacheslide.stamping import Desk

    desk = Desk(binding(), "stamp", "")
    headers = MutableHeaders({"x-request-id": header} if header else {})
    sent = {"request_id": given, "kv_transfer_params": {PARAMETER: plan()}}
    stamped = json.loads(desk.stamped(json.dumps(sent).encode(), "cmpl", headers))
    name = headers["x-request-id"]
    expected = desk.receipt_id(desk.tenant_of(headers), f"cmpl-{name}")
    assert stamped["kv_transfer_params"][PARAMETER]["request_id"] == expected
    assert stamped["kv_transfer_params"][PARAMETER]["stamp"] == "stamp"
    if header.isascii() and header:
        assert name == header
    else:
        assert (name == given) == kept
        assert kept or (len(name) == 32 and set(name) <= set("0123456789abcdef"))
