"""Policies by the names that tables, the command line and LangChain use.

In: a name. Out: the policy with its default knobs.
"""

from __future__ import annotations

from collections.abc import Callable

from cacheslide_agents.errors import RequestError
from cacheslide_agents.policies.base import Policy, Population
from cacheslide_agents.policies.cache_blend import CacheBlend
from cacheslide_agents.policies.cacheslide import CacheSlide
from cacheslide_agents.policies.epic import Epic
from cacheslide_agents.policies.prefix import Prefix
from cacheslide_agents.policies.prompt_cache import PromptCache
from cacheslide_agents.policies.recompute import Recompute

_FACTORIES: dict[str, Callable[[], Policy]] = {
    "recompute": Recompute,
    "prefix": Prefix,
    "prompt_cache": PromptCache,
    "cache_blend": CacheBlend,
    "epic": Epic,
    "cache_blend_context": lambda: CacheBlend(population=Population.CONTEXT),
    "epic_context": lambda: Epic(population=Population.CONTEXT),
    "cacheslide": CacheSlide,
    "cacheslide_paper": CacheSlide.paper,
}
POLICY_NAMES: tuple[str, ...] = tuple(_FACTORIES)


def named(name: str) -> Policy:
    """The policy called `name`, with the knobs its paper gives; `RequestError` if there is none."""
    if name not in _FACTORIES:
        raise RequestError(f"no policy is named {name!r}; known: {', '.join(POLICY_NAMES)}")
    return _FACTORIES[name]()
