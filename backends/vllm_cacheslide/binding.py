"""From a client's chunk plan to an annotation in tokens.

In: the body of a completions or chat completions request, and whose it is. Out: an `Annotation`. A
plan that cannot be used makes one that reuses nothing and says why; it never fails the request.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import accumulate
from typing import Any

from cacheslide_agents.chunks import Chunk, ChunkedPrompt, Message, Span
from cacheslide_agents.errors import CacheSlideError, RequestError
from cacheslide_agents.policies import named
from cacheslide_agents.policies.base import Policy
from cacheslide_agents.prompt.auto import chunk_messages
from cacheslide_agents.prompt.chat import ChatEncoder
from cacheslide_agents.prompt.wire_plan import (
    PlannedChunk,
    WirePlan,
    digest_of_ids,
    digest_of_text,
    read_plan,
)
from vllm_cacheslide.wire import MOST_TEXT, PARAMETER, Annotation

_LONGEST_TOKEN = 64
"""Characters, on average; a longer prompt fits no window and is not worth the rendering."""


class Binding:
    """Safe to call from several threads.

    `encoder` renders as vLLM does, or says why none could be made. `policy`: for plans that name
    none. `window`: tokens.
    """

    def __init__(self, encoder: ChatEncoder | str, policy: Policy, window: int) -> None:
        self._encoder, self._policy, self._window = encoder, policy, window

    def annotate(self, body: Mapping[str, Any], tenant: str, request_id: str) -> Annotation:
        """`tenant` and `request_id` are the server's own; nothing of the client's replaces them."""
        plain = Annotation(request_id, tenant, "default", None, (), self._policy, True)
        try:
            plan = read_plan(body["kv_transfer_params"][PARAMETER])
            policy = self._policy if plan.policy is None else named(plan.policy)
            spans, digest = self._spans(plan, body)
        except CacheSlideError as error:
            return replace(plain, dropped=_sendable(f"plan dropped: {error}")[:MOST_TEXT])
        return replace(
            plain,
            namespace=f"{tenant}/{plan.namespace}",
            task=plan.task,
            session=plan.session,
            spans=spans,
            policy=policy,
            digest=digest,
        )

    def _spans(self, plan: WirePlan, body: Mapping[str, Any]) -> tuple[tuple[Span, ...], str]:
        """The chunks in tokens, and the digest of the ids they are for."""
        if plan.unit == "tokens":
            return tuple(_counted(plan)), plan.digest
        if isinstance(self._encoder, str):
            raise RequestError(f"the server cannot cut by characters: {self._encoder}")
        if plan.length > self._window * _LONGEST_TOKEN:
            raise RequestError(f"{plan.length} characters are more than the model's window holds")
        encoded = self._encoder.encode(
            _cut(plan, body.get("messages")),
            tools=body.get("tools"),
            add_generation_prompt=body.get("add_generation_prompt", True) is True,
        )
        return encoded.spans, digest_of_ids(encoded.ids)


def _sendable(text: str) -> str:
    """Lone surrogates, which a client's JSON can spell and an error quotes, spelled out."""
    return text.encode("utf-8", "backslashreplace").decode()


def _counted(plan: WirePlan) -> Iterator[Span]:
    """Without digests: the ids are not here."""
    stops = accumulate(chunk.length for chunk in plan.chunks)
    for chunk, stop in zip(plan.chunks, stops, strict=True):
        yield Span(chunk.id, chunk.role, stop - chunk.length, stop, "")


def _cut(plan: WirePlan, messages: Any) -> ChunkedPrompt:
    """The messages in the plan's chunks; `RequestError` if the plan is not about them."""
    if not isinstance(messages, list):
        raise RequestError("a plan in characters needs messages")
    prompt = chunk_messages(messages, task=plan.task)
    turns = [(message.role, message.content) for message in prompt.messages]
    if digest_of_text(turns) != plan.digest:
        raise RequestError("the chunk plan is for other messages than those sent")
    left = iter([chunk for chunk in plan.chunks if chunk.length])
    cut = [replace(each, chunks=tuple(_taken(each, left))) for each in prompt.messages]
    if next(left, None) is not None:
        raise RequestError("the chunks are longer than the messages")
    return replace(prompt, messages=tuple(cut))


def _taken(message: Message, chunks: Iterator[PlannedChunk]) -> Iterator[Chunk]:
    """The next of `chunks`, exactly as many as fill the message."""
    text, here = message.content, 0
    while here < len(text):
        chunk = next(chunks, None)
        if chunk is None or here + chunk.length > len(text):
            raise RequestError("the chunks do not end where the messages end")
        yield Chunk(chunk.id, text[here : here + chunk.length], chunk.role)
        here += chunk.length
