"""The turns of a data folder that fit one model.

In: the folder, the model's tokenizer and window. Out: changed turns of the tasks asked for, as
prompts or in tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from cacheslide_agents.backend import Backend
from cacheslide_agents.bench.measure import Encode
from cacheslide_agents.bench.runner import token_limits
from cacheslide_agents.bench.workloads import Limits, Turn, load_turns
from cacheslide_agents.chunks import EncodedPrompt
from cacheslide_agents.prompt.chat import ChatEncoder

AGENTS = ("reflexion", "memgpt", "swe_agent")
"""Tasks that are an agent's own; `append` is made of their turns."""
ANSWERERS = ("reflexion", "memgpt")
"""Agents whose turns answer a question."""
Pair = tuple[EncodedPrompt, EncodedPrompt]
"""The prompts of turns t-1 and t."""


@dataclass(frozen=True)
class TaskData:
    """`limit` turns of each task (default: all) within `limits`, in the order of `seed`."""

    data: Path
    encode: Encode
    limits: Limits
    limit: int | None = None
    seed: int = 0

    @classmethod
    def of(
        cls,
        backend: Backend,
        data: Path,
        *,
        limit: int | None,
        seed: int,
        max_prompt_tokens: int,
    ) -> Self:
        """What the backend's model can take, counted in its own tokens."""
        encode = ChatEncoder(backend.tokenizer).encode
        return cls(data, encode, token_limits(backend, encode, max_prompt_tokens), limit, seed)

    def turns(self, tasks: Iterable[str]) -> list[Turn]:
        """Those of one task after the other. `DataError` for an unknown task, or one without."""
        return [
            turn
            for task in tasks
            for turn in load_turns(task, self.data, self.limits, limit=self.limit, seed=self.seed)
        ]

    def pairs(self, tasks: Iterable[str]) -> list[Pair]:
        """The same in tokens."""
        turns = self.turns(tasks)
        return [(self.encode(turn.populate), self.encode(turn.measure)) for turn in turns]
