"""One request, from what the caller asked to what the client sends.

In: a question, and what is known of the server. Out: an `Exchange` with the arguments of the
`openai` client, the chunk plan included if the server wants one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from langchain_core.messages import BaseMessage
from langchain_core.outputs import ChatGenerationChunk

from cacheslide_agents.chunks import ChunkedPrompt, EncodedPrompt
from cacheslide_agents.errors import PromptError, RequestError
from cacheslide_agents.prompt.wire_plan import plan_of
from langchain_cacheslide.messages import from_messages
from langchain_cacheslide.parameters import DENSE
from langchain_cacheslide.question import Question
from langchain_cacheslide.remote_answer import StreamedAnswer
from langchain_cacheslide.remote_question import Patience
from langchain_cacheslide.remote_request import body_of, knobs_of
from langchain_cacheslide.remote_server import Facts

Cut = Callable[
    [Sequence[BaseMessage], str | None, Sequence[Any] | None, str], ChunkedPrompt | EncodedPrompt
]
"""The chunks of messages, with a task (`None`: the messages' own), tools and the namespace."""


@dataclass
class Exchange:
    """One request and what has come back. `reason` says why it carries no plan; "" if it does."""

    arguments: dict[str, Any]
    reason: str
    knobs: Mapping[str, Any]
    patience: Patience
    answer: StreamedAnswer = field(default_factory=StreamedAnswer)
    started: float = field(default_factory=time.perf_counter)
    ttft_s: float = 0.0

    def add(self, event: Any) -> ChatGenerationChunk | None:
        """What a stream's event says, in LangChain's words; `None` if nothing."""
        chunk = self.answer.add(plain(event))
        if chunk is not None and self.answer.pieces == 1:
            self.ttft_s = time.perf_counter() - self.started
        return chunk


def prepared(facts: Facts, cut: Cut, question: Question, *, stream: bool) -> Exchange:
    """The request, ready to be sent. `RequestError` for settings that no server could honour."""
    body, settings = body_of(question), question.settings
    policy, knobs = _policy_name(settings), knobs_of(settings)
    extra, reason = dict(knobs), facts.reason
    if not reason:
        plan, reason = _plan(cut, question, policy, body.get("tools"))
        extra |= plan
    arguments = {**body, "model": facts.model, "stream": stream}
    if stream:
        arguments["stream_options"] = {"include_usage": True}
    if extra:
        arguments["extra_body"] = extra
    return Exchange(arguments, reason, knobs, Patience.of(settings))


def cut_by_characters(
    messages: Sequence[BaseMessage], task: str | None, tools: Sequence[Any] | None, namespace: str
) -> ChunkedPrompt:
    """Chunks of the text alone, which needs no tokenizer."""
    return from_messages(messages, task)


def plain(answer: Any) -> dict[str, Any]:
    """What the client read, as plain values; it checks nothing but that it was JSON."""
    if not hasattr(answer, "to_dict"):
        raise ValueError(f"expected a JSON object, got {type(answer).__name__}")
    return cast("dict[str, Any]", answer.to_dict(warnings=False))


def _plan(
    cut: Cut, question: Question, policy: str | None, tools: Sequence[Any] | None
) -> tuple[dict[str, Any], str]:
    """The field that carries the plan, or why there is none; a plan is never worth an error."""
    settings = question.settings
    namespace = settings.get("namespace") or "default"
    try:
        plan = plan_of(
            cut(question.messages, settings.get("task"), tools, namespace),
            namespace=namespace,
            session=settings.get("session"),
            policy=policy,
        )
    except (PromptError, RequestError) as error:
        return {}, f"no chunk plan was sent: {error}"
    return {"kv_transfer_params": {"cacheslide": plan.to_dict()}}, ""


def _policy_name(settings: Mapping[str, Any]) -> str | None:
    """The policy to ask for, by name: its parameters stay the server's."""
    if not settings.get("reuse", True):
        return DENSE
    policy = settings.get("policy")
    if policy is None or isinstance(policy, str):
        return policy
    raise RequestError(
        f"policy={policy!r}: a server takes a policy by its name, as in policy={policy.name!r}"
    )
