"""A backend that gives scripted answers and writes down in which order it was asked and hinted.

In: answers. Out: those, letter by letter, one for each request; `events`, such as
("generate", "s1"), ("pin", "s1"); `hinted`, the namespaces that hints were for.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from cacheslide_agents.backend import GenerationChunk, GenerationRequest

if TYPE_CHECKING:
    from tests.support.fake_backend import FakeBackend
else:
    FakeBackend = sys.modules["tests.support.fake_backend"].FakeBackend


class HintingBackend(FakeBackend):
    """Load `fake_backend` first. The last answer is repeated where the script ends."""

    def __init__(self, answers: Iterable[str], **options: Any) -> None:
        super().__init__(max_model_len=100_000, **options)
        self._script = list(answers)
        self.events: list[tuple[str, str | None]] = []
        self.warmed: list[str] = []
        self.hinted: set[str] = set()

    def _pieces(self, request: GenerationRequest) -> Iterator[GenerationChunk]:
        self.events.append(("generate", request.session))
        text = self._script.pop(0) if len(self._script) > 1 else self._script[0]
        for letter in text:
            yield GenerationChunk(0, letter, tuple(self.tokenizer.encode(letter)))
        yield GenerationChunk(0, "", (), finish_reason="stop", receipt=self._receipt(request))

    def warm(self, request: GenerationRequest) -> None:
        self.events.append(("warm", request.session))
        self.warmed.append(self.prompt(request))

    def pin(self, session: str, namespace: str = "default") -> None:
        self._hinted("pin", session, namespace)

    def release(self, session: str, namespace: str = "default") -> None:
        self._hinted("release", session, namespace)

    def refresh(self, session: str, namespace: str = "default") -> None:
        self._hinted("refresh", session, namespace)

    def _hinted(self, hint: str, session: str, namespace: str) -> None:
        self.events.append((hint, session))
        self.hinted.add(namespace)

    def prompts(self) -> list[str]:
        return [self.prompt(request) for request in self.requests]
