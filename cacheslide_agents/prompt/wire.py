"""The side channel of chunk plans: how a message is cut, known by its text alone.

In: prompts whose chunks are known. Out: the same chunks for a message that lost its annotations on
the way, as middleware that rebuilds messages loses them.

A plan is keyed to the namespace and to a digest of the message's role and text. A text that changed
finds no plan, so that a plan can name chunks but never change what is sent.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from threading import Lock

from cacheslide_agents.chunks import Chunk, ChunkedPrompt, Message, Role, text_digest

CAPACITY = 65_536
"""Chunks remembered by one side channel: about 16 MB of ids."""
MOST_TASKS = 8
"""Tasks remembered of one message; a text in more kinds of prompt says little about the kind."""


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """The chunks of one message: (id, role, characters) in order.

    `tasks`: the kinds of prompt in which it was seen, the last one last.
    """

    tasks: tuple[str, ...]
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
    """What a message's plan is found by, within its namespace."""
    return text_digest(f"{message.role}\0{message.content}")


def shared_task(opening: Iterable[ChunkPlan | None]) -> str | None:
    """The task of a conversation whose first messages have these plans; `None` if it is not clear.

    Only a task in which all of them were seen will do: one text, such as a system prompt, may be
    part of several kinds of prompt, and of conversations that are of no kind.
    """
    seen = [set() if plan is None else set(plan.tasks) for plan in opening]
    common = set.intersection(*seen) if seen else set()
    return common.pop() if len(common) == 1 else None


class ChunkPlans:
    """Plans of the messages seen last; the least recently used go. Safe to call from threads.

    A namespace sees only what was remembered in it.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._plans: OrderedDict[tuple[str, str], ChunkPlan] = OrderedDict()
        self._held = 0
        self._lock = Lock()

    def remember(self, prompt: ChunkedPrompt, namespace: str) -> None:
        """Keep the chunks of every message of `prompt` that has any."""
        for message in prompt.messages:
            if message.chunks:
                cut = tuple((chunk.id, chunk.role, len(chunk.text)) for chunk in message.chunks)
                self._keep((namespace, plan_key(message)), cut, prompt.task)

    def recall(self, message: Message, namespace: str) -> ChunkPlan | None:
        """The plan of the message with this role and text, however it is cut now."""
        if not self._plans:
            return None
        key = (namespace, plan_key(message))
        with self._lock:
            plan = self._plans.get(key)
            if plan is not None:
                self._plans.move_to_end(key)
            return plan

    def _keep(
        self, key: tuple[str, str], cut: tuple[tuple[str, Role, int], ...], task: str
    ) -> None:
        with self._lock:
            known = self._plans.pop(key, None)
            earlier = () if known is None else known.tasks
            self._held += len(cut) - (0 if known is None else len(known.chunks))
            tasks = (*(each for each in earlier if each != task), task)
            self._plans[key] = ChunkPlan(tasks[-MOST_TASKS:], cut)
            while self._held > self._capacity:
                self._held -= len(self._plans.popitem(last=False)[1].chunks)
