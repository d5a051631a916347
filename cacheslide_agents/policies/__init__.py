"""Policies (what to reuse, where, and what to recompute) and the planner that applies them."""

from cacheslide_agents.policies.base import Order, Plan, Policy, Population, Probe, Reuse
from cacheslide_agents.policies.cache_blend import CacheBlend
from cacheslide_agents.policies.cacheslide import CacheSlide
from cacheslide_agents.policies.epic import Epic
from cacheslide_agents.policies.prefix import Prefix
from cacheslide_agents.policies.prompt_cache import PromptCache
from cacheslide_agents.policies.recompute import Recompute
from cacheslide_agents.policies.registry import POLICY_NAMES, named

__all__ = [
    "POLICY_NAMES",
    "CacheBlend",
    "CacheSlide",
    "Epic",
    "Order",
    "Plan",
    "Policy",
    "Population",
    "Prefix",
    "Probe",
    "PromptCache",
    "Recompute",
    "Reuse",
    "named",
]
