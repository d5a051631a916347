"""A handful of passages behind the two actions of ReAct.

In: passages with titles. Out: what `Search[name]` and `Lookup[words]` observe.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

_SENTENCE = re.compile(r"(?<=[.!?])\s+")
_SIMILAR = 5


class Passages:
    """`lookup` goes on through the passage that `search` found last. One per attempt."""

    def __init__(self, passages: Sequence[Mapping[str, str]]) -> None:
        self._texts = {passage["title"].lower(): passage["text"] for passage in passages}
        self._titles = [passage["title"] for passage in passages]
        self._text: str | None = None
        self._words = ""
        self._hits: Iterator[str] = iter(())

    def search(self, name: str) -> str:
        """The passage of that title, or titles that share most words with it."""
        found = self._texts.get(name.strip().lower())
        if found is None:
            return f"Could not find {name}. Similar: {', '.join(self._similar(name))}."
        self._text, self._words = found, ""
        return found

    def lookup(self, words: str) -> str:
        """The next sentence of the passage that holds `words`."""
        if self._text is None:
            return "There is no article yet; use Search[name] first."
        if words.lower() != self._words:
            self._words = words.lower()
            sentences = _SENTENCE.split(self._text)
            self._hits = iter([one for one in sentences if self._words in one.lower()])
        return next(self._hits, f"No more sentences hold {words}.")

    def _similar(self, name: str) -> list[str]:
        wanted = set(name.lower().split())
        ranked = sorted(self._titles, key=lambda title: -len(wanted & set(title.lower().split())))
        return ranked[:_SIMILAR]
