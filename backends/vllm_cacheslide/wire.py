"""A request's annotation as it travels in `kv_transfer_params={"cacheslide": {...}}`.

In: namespace, task, session, spans, policy. Out: the same as plain JSON, and back. What comes back
is a stranger's: it is bounded and checked, policies and selectors are ours by name, never code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from typing import Any, Self

from cacheslide_agents import policies, selection
from cacheslide_agents.backend import GenerationRequest
from cacheslide_agents.chunks import Role, Span
from cacheslide_agents.errors import RequestError
from cacheslide_agents.policies.base import Policy, Population, Reuse
from cacheslide_agents.prompt.wire_plan import digest_of_ids

PARAMETER = "cacheslide"
MOST_SPANS = 4096
MOST_TEXT = 512
"""Characters of a name, an id or a digest."""
MOST_VALUES = 65536
"""Numbers and names in a policy: `Fixed` lists positions."""

_TYPES: dict[str, type] = {
    name: found
    for module in (policies, selection)
    for name in module.__all__
    if isinstance(found := getattr(module, name), type) and is_dataclass(found)
}
_ENUMS: dict[str, type[Enum]] = {
    kind.__name__: kind for kind in (policies.Order, Population, Reuse)
}


@dataclass(frozen=True)
class Annotation:
    """What a client says of its prompt; see `GenerationRequest`.

    With `isolated` the prompt is one chunk, to be stored as computed alone. `digest` is the
    `digest_of_ids` that the spans are for; empty where the ids came along with them. `dropped` says
    why nothing is to be reused or stored, empty if it is.
    """

    request_id: str
    namespace: str
    task: str
    session: str | None
    spans: tuple[Span, ...]
    policy: Policy
    retain: bool
    isolated: bool = False
    digest: str = ""
    dropped: str = ""

    @classmethod
    def of(cls, request: GenerationRequest, policy: Policy) -> Self:
        spans = tuple(request.spans)
        named = (request.request_id, request.namespace, request.task, request.session)
        return cls(*named, spans, policy, request.retain)

    def to_params(self) -> dict[str, Any]:
        """The value of `kv_transfer_params`."""
        spans = [
            [each.id, each.role.value, each.start, each.stop, each.digest] for each in self.spans
        ]
        body = {
            "request_id": self.request_id,
            "namespace": self.namespace,
            "task": self.task,
            "session": self.session,
            "spans": spans,
            "policy": encode_policy(self.policy),
            "retain": self.retain,
            "isolated": self.isolated,
            "digest": self.digest,
            "dropped": self.dropped,
        }
        return {PARAMETER: body}

    @classmethod
    def from_params(cls, params: Mapping[str, Any]) -> Self:
        """Raises `RequestError` that names what is wrong."""
        body = params.get(PARAMETER)
        if not isinstance(body, Mapping):
            raise RequestError(f"kv_transfer_params[{PARAMETER!r}] must be an object")
        session = body.get("session")
        spans = body.get("spans", [])
        if not isinstance(spans, Sequence) or len(spans) > MOST_SPANS:
            raise RequestError(f"spans must be a list of at most {MOST_SPANS}")
        return cls(
            request_id=_text(body, "request_id"),
            namespace=_text(body, "namespace"),
            task=_text(body, "task"),
            session=None if session is None else _text(body, "session"),
            spans=tuple(_span(each) for each in spans),
            policy=decode_policy(body.get("policy")),
            retain=body.get("retain", True) is True,
            isolated=body.get("isolated", False) is True,
            digest=_text(body, "digest", ""),
            dropped=_text(body, "dropped", ""),
        )

    def bound_to(self, ids: Sequence[int]) -> Annotation:
        """This one with the spans' digests, or a dropped one if it is about other ids."""
        if not self.digest or self.dropped:
            return self
        if digest_of_ids(ids) != self.digest:
            why = "plan dropped: it is for other token ids than the server's; is the chat template"
            return replace(self, spans=(), dropped=f"{why} or the tokenizer another one?")
        spans = (
            span
            if span.digest
            else replace(span, digest=digest_of_ids(ids[span.start : span.stop]))
            for span in self.spans
        )
        return replace(self, spans=tuple(spans))


def encode_policy(policy: object) -> Any:
    """`RequestError` for a policy or selector that is not one of the core's."""
    if isinstance(policy, Enum):
        return {"enum": type(policy).__name__, "value": policy.value}
    if is_dataclass(policy):
        name = type(policy).__name__
        if _TYPES.get(name) is not type(policy):
            raise RequestError(
                f"{name} cannot travel to vLLM: only the policies and selectors of "
                "cacheslide_agents.policies and cacheslide_agents.selection can"
            )
        return {"type": name} | {
            field.name: encode_policy(getattr(policy, field.name))
            for field in fields(policy)
            if field.init
        }
    if isinstance(policy, (tuple, list)):
        return [encode_policy(each) for each in policy]
    return policy


def decode_policy(value: Any) -> Policy:
    """`RequestError` for what `encode_policy` did not write."""
    policy = _Decoder().decode(value)
    if not isinstance(policy, Policy):
        raise RequestError("policy must be a policy of cacheslide_agents.policies")
    return policy


class _Decoder:
    """Counts what it has read, so that no small program grows into a large one."""

    def __init__(self) -> None:
        self._left = MOST_VALUES

    def decode(self, value: Any, depth: int = 0) -> Any:
        self._left -= 1
        if self._left < 0 or depth > 8:
            raise RequestError("policy is too large")
        if isinstance(value, (list, tuple)):
            return tuple(self.decode(each, depth + 1) for each in value)
        if not isinstance(value, Mapping):
            if value is None or isinstance(value, (bool, int, float, str)):
                return value
            raise RequestError(f"policy holds a {type(value).__name__}")
        if "enum" in value:
            return self._enum(value)
        return self._dataclass(value, depth)

    def _enum(self, value: Mapping[str, Any]) -> Enum:
        kind = _ENUMS.get(str(value["enum"]))
        if kind is None or value.get("value") not in {each.value for each in kind}:
            raise RequestError(f"policy holds an unknown value: {dict(value)!r:.200}")
        return kind(value["value"])

    def _dataclass(self, value: Mapping[str, Any], depth: int) -> Any:
        kind = _TYPES.get(str(value.get("type")))
        if kind is None:
            raise RequestError(f"policy holds an unknown type: {value.get('type')!r:.200}")
        given = {
            str(name): self.decode(each, depth + 1)
            for name, each in value.items()
            if name != "type"
        }
        try:
            if kind is selection.Union:
                return selection.Union(*given["selectors"])
            return kind(**given)
        except (TypeError, KeyError) as error:
            raise RequestError(f"policy cannot be made: {error}") from None


def _text(body: Mapping[str, Any], name: str, default: str | None = None) -> str:
    value = body.get(name, default)
    if not isinstance(value, str) or len(value) > MOST_TEXT:
        raise RequestError(f"{name} must be a string of at most {MOST_TEXT} characters")
    return value


def _span(value: Any) -> Span:
    try:
        id_, role, start, stop, digest = value
        span = Span(id_, Role(role), start, stop, digest)
    except (TypeError, ValueError):
        raise RequestError(f"span {value!r:.200} must be [id, role, start, stop, digest]") from None
    numbers = (span.start, span.stop)
    texts = (span.id, span.digest)
    if not all(type(each) is int for each in numbers) or not all(
        isinstance(each, str) and len(each) <= MOST_TEXT for each in texts
    ):
        raise RequestError(f"span {value!r:.200} must be [id, role, start, stop, digest]")
    return span
