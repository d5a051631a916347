"""The side channel of chunk plans: how a message is cut, known by its text alone.

In: prompts whose chunks are known. Out: the same chunks for a message that lost its annotations on
the way, as middleware that rebuilds messages loses them.

A plan is keyed to a digest of the message's role and text. A text that changed finds no plan, so
that a plan can name chunks but never change what is sent.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from itertools import accumulate, pairwise
from threading import Lock

from cacheslide_agents.chunks import Chunk, ChunkedPrompt, Message, Role, text_digest

CAPACITY = 65_536
"""Chunks remembered by one side channel: about 16 MB of ids."""


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """The chunks of one message: (id, role, characters) in order, and the task they belong to."""

    task: str
    chunks: tuple[tuple[str, Role, int], ...]

    def cut(self, text: str) -> tuple[Chunk, ...]:
        """`text` in chunks; it must be the one the plan was made of."""
        ends = accumulate((length for _, _, length in self.chunks), initial=0)
        bounds = pairwise(ends)
        return tuple(
            Chunk(name, text[start:stop], role)
            for (name, role, _), (start, stop) in zip(self.chunks, bounds, strict=True)
        )


def plan_key(message: Message) -> str:
    """What a message's plan is found by."""
    return text_digest(f"{message.role}\0{message.content}")


class ChunkPlans:
    """Plans of the messages seen last; the least recently used go. Safe to call from threads."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._plans: OrderedDict[str, ChunkPlan] = OrderedDict()
        self._held = 0
        self._lock = Lock()

    def remember(self, prompt: ChunkedPrompt) -> None:
        """Keep the chunks of every message of `prompt` that has any."""
        for message in prompt.messages:
            if message.chunks:
                cut = tuple((chunk.id, chunk.role, len(chunk.text)) for chunk in message.chunks)
                self._keep(plan_key(message), ChunkPlan(prompt.task, cut))

    def recall(self, message: Message) -> ChunkPlan | None:
        """The plan of the message with this role and text, however it is cut now."""
        if not self._plans:
            return None
        key = plan_key(message)
        with self._lock:
            plan = self._plans.get(key)
            if plan is not None:
                self._plans.move_to_end(key)
            return plan

    def _keep(self, key: str, plan: ChunkPlan) -> None:
        with self._lock:
            if known := self._plans.pop(key, None):
                self._held -= len(known.chunks)
            self._plans[key] = plan
            self._held += len(plan.chunks)
            while self._held > self._capacity:
                self._held -= len(self._plans.popitem(last=False)[1].chunks)
