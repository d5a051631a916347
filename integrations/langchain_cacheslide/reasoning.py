"""A model's thoughts apart from what it says.

In: pieces of an answer's text. Out: pieces of thought and of speech.
"""

from __future__ import annotations

OPEN, CLOSE = "<think>", "</think>"


class ThoughtSplitter:
    """Thoughts stand at the head of an answer, in `<think>` tags.

    `thinking`: the prompt already ended with the opening tag, as some chat templates have it.
    """

    def __init__(self, thinking: bool = False) -> None:
        self._state = "thought" if thinking else "head"
        self._held = ""
        self._fresh = True  # nothing but white space since the last tag

    @property
    def thinking(self) -> bool:
        return self._state == "thought"

    def feed(self, text: str) -> tuple[str, str]:
        """(thought, speech) that `text` made certain."""
        if self._state == "speech":
            return "", self._spoken(text)
        self._held += text
        if self._state == "head":
            seen = self._held.lstrip()
            if not seen or (OPEN.startswith(seen) and seen != OPEN):
                return "", ""
            if not seen.startswith(OPEN):
                return "", self._release()
            self._state, self._held = "thought", seen[len(OPEN) :]
        return self._thought()

    def finish(self) -> tuple[str, str]:
        """Everything held back; the answer ends."""
        held, self._held = self._held, ""
        if self._state == "thought":
            return held.rstrip(), ""
        return "", held

    def _release(self) -> str:
        held, self._held, self._state, self._fresh = self._held, "", "speech", False
        return held

    def _thought(self) -> tuple[str, str]:
        thought, tag, rest = self._held.partition(CLOSE)
        if tag:
            self._state, self._held = "speech", ""
            thought, self._fresh = self._pondered(thought.rstrip()), True
            return thought, self._spoken(rest)
        keep = next((n for n in range(len(CLOSE) - 1, 0, -1) if self._held.endswith(CLOSE[:n])), 0)
        certain = self._held[: len(self._held) - keep].rstrip()
        self._held = self._held[len(certain) :]
        return self._pondered(certain), ""

    def _pondered(self, thought: str) -> str:
        """Without the white space between the opening tag and the first thought."""
        if self._fresh:
            thought = thought.lstrip()
            self._fresh = not thought
        return thought

    def _spoken(self, text: str) -> str:
        """Without the white space between the closing tag and the first word."""
        if self._fresh:
            text = text.lstrip()
            self._fresh = not text
        return text
