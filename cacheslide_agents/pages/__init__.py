"""Where the keys and values of stored contexts lie."""

from cacheslide_agents.pages.base import (
    PAGE_TOKENS,
    ContextKey,
    LayerKV,
    PageStore,
    StoredContext,
)
from cacheslide_agents.pages.eviction import Eviction, Lru
from cacheslide_agents.pages.store import MemoryStore

__all__ = [
    "PAGE_TOKENS",
    "ContextKey",
    "Eviction",
    "LayerKV",
    "Lru",
    "MemoryStore",
    "PageStore",
    "StoredContext",
]
