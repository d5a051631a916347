"""What may be set per call, and what is refused.

In: a model's own settings and the keyword arguments of one call. Out: one mapping of settings, from
which `Sampling`, the policy and the wish for an answer are made.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

from cacheslide_agents.backend import PolicyLike, Sampling
from cacheslide_agents.errors import RequestError
from cacheslide_agents.sampling import Grammar

SAMPLING = (
    "temperature",
    "max_tokens",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "seed",
    "stop",
    "n",
    "num_beams",
    "length_penalty",
)
LOGPROBS = ("logprobs", "top_logprobs")
ROUTING = ("namespace", "task", "session", "reuse", "policy")
PATIENCE = ("timeout", "max_retries")
SETTINGS = (*SAMPLING, *LOGPROBS, *ROUTING, "model", *PATIENCE)
ANSWER = ("tools", "tool_choice", "parallel_tool_calls", "strict", "response_format", "grammar")
"""What only a call or a binding says."""
_NEEDED = frozenset(SAMPLING) - {"seed", "stop"} | {"namespace", "reuse", "model", "max_retries"}
"""For these `None` means nothing but "not given"; for the others it is a value, too."""
LONGEST_TIMEOUT_S = 604_800
"""Sockets and locks cannot wait for any number of seconds."""
DENSE = "recompute"
"""The policy that stores nothing and reuses nothing."""

_LANGCHAIN_OWN = frozenset({"stream"})
"""Keyword arguments that langchain-core itself acts on and hands down all the same."""


def merge(
    defaults: Mapping[str, Any], stop: Sequence[str] | None, given: Mapping[str, Any]
) -> dict[str, Any]:
    """`defaults` overridden by one call's arguments.

    Raises `RequestError` for an argument that has no meaning here: none is silently ignored.
    `None` stands for "not given", as LangChain passes absent tools, and for "none": no seed, say.
    """
    merged = {**dict.fromkeys(ANSWER), **defaults}
    if stop is not None:
        merged["stop"] = stop
    for name, value in given.items():
        if not is_given(name, value):
            continue
        if name in merged:
            merged[name] = value
        elif value is not None and name not in _LANGCHAIN_OWN:
            known = ", ".join((*SETTINGS, *ANSWER))
            raise RequestError(
                f"ChatCacheSlide, argument {name!r}: no such argument; known: {known}"
            )
    return merged


def is_given(name: str, value: Any) -> bool:
    """Whether `value` says anything of the setting `name`."""
    return value is not None or name not in _NEEDED


def sampling(settings: Mapping[str, Any]) -> Sampling:
    """The decoding parameters among `settings`.

    `RequestError` when one of all settings is of no kind it may be, or out of range.
    """
    for name, (holds, rule) in _KINDS.items():
        if name in settings and not holds(settings[name]):
            raise RequestError(f"{name}={settings[name]!r:.120} must be {rule}")
    stop = settings["stop"] or ()
    values = {name: settings[name] for name in SAMPLING if name != "stop"}
    return Sampling(
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        logprobs=_logprobs(settings["logprobs"], settings["top_logprobs"]),
        **values,
    )


def policy(settings: Mapping[str, Any]) -> PolicyLike | None:
    """The policy of a call; `None` leaves it to the backend. `reuse=False` means dense."""
    chosen: str | PolicyLike | None = settings["policy"] if settings["reuse"] else DENSE
    if not isinstance(chosen, str):
        return chosen
    # Policies import torch, which `import langchain_cacheslide` must not.
    from cacheslide_agents.policies import named

    return named(chosen)


def check_streamable(settings: Mapping[str, Any]) -> None:
    """`RequestError` for several answers, which LangChain's streams have no place for."""
    if settings["n"] != 1:
        raise RequestError(f"n={settings['n']} answers cannot be streamed; use invoke or generate")


def _logprobs(wanted: bool | None, top: int | None) -> int | None:
    """OpenAI's two switches as one number of alternatives."""
    if not isinstance(wanted, bool | None):
        raise RequestError(
            f"logprobs={wanted!r} must be True or False; say how many by top_logprobs"
        )
    if top is None:
        return 0 if wanted else None
    if not wanted:
        raise RequestError(f"top_logprobs={top!r} needs logprobs=True")
    return top


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_list(value: Any, kind: type | tuple[type, ...] = object) -> bool:
    """A string or a mapping is no list of what it is made of."""
    listed = isinstance(value, Collection) and not isinstance(value, str | bytes | Mapping)
    return listed and all(isinstance(each, kind) for each in value)


_TEXT = (lambda value: isinstance(value, str), "a string")
_TEXT_OR_NONE = (lambda value: isinstance(value, str | None), "a string, or None")
_SWITCH = (lambda value: isinstance(value, bool), "True or False")
_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "stop": (
        lambda value: value is None or isinstance(value, str) or _is_list(value, str),
        "a string or a list of strings, or None",
    ),
    "namespace": _TEXT,
    "task": _TEXT_OR_NONE,
    "session": _TEXT_OR_NONE,
    "model": _TEXT_OR_NONE,
    "reuse": _SWITCH,
    "policy": (
        lambda value: value is None or isinstance(getattr(value, "name", value), str),
        "a policy or its name, or None",
    ),
    "timeout": (
        lambda value: value is None or (_is_number(value) and 0 < value <= LONGEST_TIMEOUT_S),
        f"a number of seconds above 0 and at most {LONGEST_TIMEOUT_S} (a week), or None",
    ),
    "max_retries": (
        lambda value: _is_number(value) and isinstance(value, Integral) and int(value) >= 0,
        "at least 0, and whole",
    ),
    "tool_choice": (
        lambda value: isinstance(value, str | bool | Mapping | None),
        "'auto', 'none', 'any', the name of a tool, or None",
    ),
    "parallel_tool_calls": (
        lambda value: isinstance(value, bool | None),
        "True or False, or None",
    ),
    "strict": (lambda value: isinstance(value, bool | None), "True or False, or None"),
    "grammar": (
        lambda value: (
            value is None
            or isinstance(value, Grammar)
            or (_is_list(value, str) and 1 <= len(value) <= 2)
        ),
        "a Grammar, or its kind and its source, as in ('regex', '[0-9]+')",
    ),
}
"""What may be in a setting; `Sampling` checks the numbers of its own, `demand` the rest."""
