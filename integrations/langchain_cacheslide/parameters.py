"""What may be set per call, and what is refused.

In: a model's own settings and the keyword arguments of one call. Out: one mapping of settings, from
which `Sampling` and the policy are made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cacheslide_agents.backend import PolicyLike, Sampling
from cacheslide_agents.errors import RequestError

SAMPLING = ("temperature", "max_tokens", "top_p", "top_k", "seed", "stop")
ROUTING = ("namespace", "task", "session", "reuse", "policy")
SETTINGS = (*SAMPLING, *ROUTING)
DENSE = "recompute"
"""The policy that stores nothing and reuses nothing."""

_TOOLS = "tool calling is not supported by this version"
_STRUCTURED = "structured output is not supported by this version"
_LOGPROBS = "log-probabilities are not returned by this version; use Backend.score"
_REFUSED = {
    "tools": _TOOLS,
    "tool_choice": _TOOLS,
    "functions": _TOOLS,
    "function_call": _TOOLS,
    "response_format": _STRUCTURED,
    "logprobs": _LOGPROBS,
    "top_logprobs": _LOGPROBS,
}
_LANGCHAIN_OWN = frozenset({"stream"})
"""Keyword arguments that langchain-core itself acts on and hands down all the same."""


def refuse_tools() -> RequestError:
    return RequestError(f"ChatCacheSlide: {_TOOLS}; call the model without bind_tools")


def refuse_structured_output() -> RequestError:
    return RequestError(f"ChatCacheSlide: {_STRUCTURED}; parse the text of the answer instead")


def merge(
    defaults: Mapping[str, Any], stop: Sequence[str] | None, given: Mapping[str, Any]
) -> dict[str, Any]:
    """`defaults` overridden by one call's arguments.

    Raises `RequestError` for an argument that has no meaning here: none is silently ignored.
    `None` stands for "not given", as LangChain passes absent tools.
    """
    merged = dict(defaults)
    if stop is not None:
        merged["stop"] = stop
    for name, value in given.items():
        if name in SETTINGS:
            merged[name] = value
        elif value is not None and name not in _LANGCHAIN_OWN:
            reason = _REFUSED.get(name, f"no such argument; known: {', '.join(SETTINGS)}")
            raise RequestError(f"ChatCacheSlide, argument {name!r}: {reason}")
    return merged


def sampling(settings: Mapping[str, Any]) -> Sampling:
    """The decoding parameters among `settings`; `RequestError` when one is out of range."""
    stop = settings["stop"] or ()
    values = {name: settings[name] for name in SAMPLING if name != "stop"}
    return Sampling(stop=(stop,) if isinstance(stop, str) else tuple(stop), **values)


def policy(settings: Mapping[str, Any]) -> PolicyLike | None:
    """The policy of a call; `None` leaves it to the backend. `reuse=False` means dense."""
    chosen: str | PolicyLike | None = settings["policy"] if settings["reuse"] else DENSE
    if not isinstance(chosen, str):
        return chosen
    # Policies import torch, which `import langchain_cacheslide` must not.
    from cacheslide_agents.policies import named

    return named(chosen)
