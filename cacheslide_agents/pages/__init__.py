"""Where the keys and values of stored contexts lie."""

from cacheslide_agents.pages.base import (
    PAGE_TOKENS,
    ContextKey,
    LayerKV,
    PageStore,
    ReusedRun,
    StoredContext,
    TokenRange,
)
from cacheslide_agents.pages.eviction import EVICTIONS, Eviction, Lru, Slide
from cacheslide_agents.pages.lease import Lease
from cacheslide_agents.pages.slide import SlideStore
from cacheslide_agents.pages.store import MemoryStore

__all__ = [
    "EVICTIONS",
    "PAGE_TOKENS",
    "ContextKey",
    "Eviction",
    "LayerKV",
    "Lease",
    "Lru",
    "MemoryStore",
    "PageStore",
    "ReusedRun",
    "Slide",
    "SlideStore",
    "StoredContext",
    "TokenRange",
]
