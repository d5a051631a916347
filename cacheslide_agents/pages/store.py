"""Stored contexts in memory only: what a process needs that keeps nothing.

In: a byte budget. Out: a page store without an SSD tier.
"""

from __future__ import annotations

from cacheslide_agents.pages.slide import SlideStore


class MemoryStore(SlideStore):
    """A `SlideStore` whose only tier is host memory: what does not fit is dropped, least recently
    used contexts first. Of one session up to 4 contexts are kept, so that a turn can be taken back.
    """

    def __init__(
        self, budget_bytes: int, *, copies_per_content: int = 2, copies_per_session: int = 4
    ) -> None:
        super().__init__(
            budget_bytes,
            copies_per_content=copies_per_content,
            copies_per_session=copies_per_session,
        )
