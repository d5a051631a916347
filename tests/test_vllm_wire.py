"""What travels in `kv_transfer_params`: equal after the way through JSON, refused when forged."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

import pytest

from cacheslide_agents.backend import GenerationRequest
from cacheslide_agents.chunks import Role, Span
from cacheslide_agents.errors import RequestError
from cacheslide_agents.policies import POLICY_NAMES, CacheSlide, named
from cacheslide_agents.selection import Affinity, Everything, Fixed, Union
from vllm_cacheslide.wire import (
    MOST_SPANS,
    MOST_TEXT,
    Annotation,
    decode_policy,
    encode_policy,
)

SPANS = (Span("a", Role.REUSE, 0, 2, "d1"), Span("b", Role.RECOMPUTE, 2, 3, "d2"))


def annotation() -> Annotation:
    request = GenerationRequest([1, 2, 3], SPANS, "tenant", "task", "session", request_id="r")
    return Annotation.of(request, CacheSlide())


def body(**changes: Any) -> dict[str, Any]:
    made = annotation().to_params()["cacheslide"]
    return {"cacheslide": {**made, **changes}}


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_every_policy_is_the_same_after_json(name: str) -> None:
    policy = named(name)
    assert decode_policy(json.loads(json.dumps(encode_policy(policy)))) == policy


@pytest.mark.parametrize(
    "selector", [Everything(), Fixed((1, 5, 9)), Union(Affinity(0.1), Fixed((2,))), None]
)
def test_every_selector_is_the_same_after_json(selector: Any) -> None:
    policy = CacheSlide(selector=selector, min_run=32, may_decline=False)
    assert decode_policy(json.loads(json.dumps(encode_policy(policy)))) == policy


def test_an_annotation_is_the_same_after_json() -> None:
    there = annotation()
    assert Annotation.from_params(json.loads(json.dumps(there.to_params()))) == there


def test_an_isolated_chunk_is_told_apart() -> None:
    alone = replace(annotation(), isolated=True)
    assert Annotation.from_params(alone.to_params()).isolated


def test_a_policy_of_someone_else_cannot_travel() -> None:
    @dataclass(frozen=True)
    class Mine:
        weight: float = 1.0

    with pytest.raises(RequestError, match="Mine cannot travel"):
        encode_policy(CacheSlide(selector=Mine()))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"namespace": None}, "namespace must be a string"),
        ({"task": "x" * (MOST_TEXT + 1)}, "task must be a string of at most"),
        ({"session": 3}, "session must be a string"),
        ({"spans": [["a", "reuse", 0, 1, "d"]] * (MOST_SPANS + 1)}, "spans must be a list"),
        ({"spans": [["a", "owner", 0, 1, "d"]]}, "must be"),
        ({"spans": [["a", "reuse", True, 1, "d"]]}, "must be"),
        ({"spans": [["a", "reuse", 0, 1]]}, "must be"),
        ({"policy": {"type": "Popen", "args": "x"}}, "unknown type: 'Popen'"),
        ({"policy": {"type": "CacheSlide", "nonsense": 1}}, "policy cannot be made"),
        ({"policy": {"type": "Affinity", "fraction": 0.1}}, "must be a policy"),
        ({"policy": {"enum": "Order", "value": "sideways"}}, "unknown value"),
        ({"policy": [[[[[[[[[[1]]]]]]]]]]}, "too large"),
        ({"policy": {"type": "Union"}}, "policy cannot be made"),
        ({"policy": "cacheslide"}, "must be a policy"),
    ],
)
def test_a_forged_annotation_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        Annotation.from_params(body(**changes))


def test_a_policy_with_endless_values_is_refused() -> None:
    selector = {"type": "Fixed", "indices": list(range(100_000))}
    with pytest.raises(RequestError, match="too large"):
        Annotation.from_params(body(policy={"type": "CacheSlide", "selector": selector}))


def test_parameters_without_our_part_are_refused() -> None:
    with pytest.raises(RequestError, match="must be an object"):
        Annotation.from_params({"cacheslide": "yes"})
