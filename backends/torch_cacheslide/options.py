"""What kind of value each option of the backend takes.

In: the options a backend is made with. Out: the same, numbers as Python's own, or an error that
names the option, its value and what is allowed. Bounds are the business of what an option is for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from numbers import Integral, Real
from types import NoneType
from typing import Any, ParamSpec

import torch

from cacheslide_agents.errors import RequestError
from cacheslide_agents.pages.base import PageStore
from cacheslide_agents.paths import expanded
from cacheslide_agents.policies.base import Policy
from cacheslide_agents.policies.canonical import profile_paths

P = ParamSpec("P")
_KINDS: Mapping[str, tuple[tuple[type, ...], str]] = {
    "device": ((str, torch.device, NoneType), "'cpu', 'cuda' or None"),
    "dtype": ((str, torch.dtype, NoneType), "a name such as 'float32', a torch.dtype or None"),
    "threads": ((Integral, NoneType), "a whole number or None"),
    "policy": ((Policy, NoneType), "one of cacheslide_agents.policies or None"),
    "store": ((PageStore, NoneType), "a PageStore or None"),
    "store_bytes": ((Integral, float), "a whole number of bytes"),
    "disk_bytes": ((Integral, float), "a whole number of bytes"),
    "prefetch": ((Integral, NoneType), "a whole number of layers or None"),
    "decoupling": ((bool, str), "a bool, 'off', 'late' or 'slots'"),
    "refresh": ((str,), "'corrected' or 'never'"),
    "guard_every": ((Integral, NoneType), "a whole number of reuses or None"),
    "guard_budget": ((Real,), "a number of nats"),
    "kernels": ((bool,), "a bool"),
}


def checked(make: Callable[P, None]) -> Callable[P, None]:
    """`make`, an `__init__`, which is now told only options of the right kind."""

    @wraps(make)
    def made(*args: P.args, **options: P.kwargs) -> None:
        for name, value in options.items():
            options[name] = _checked(name, value)
        make(*args, **options)

    return made


def _checked(name: str, value: Any) -> Any:
    if name == "profiles":
        profile_paths(value)
    elif name == "store_path" and value is not None:
        expanded(value, name)
    elif name in _KINDS:
        kinds, told = _KINDS[name]
        wrong = isinstance(value, bool) and bool not in kinds  # it is an int to Python only
        if wrong or not isinstance(value, kinds):
            raise RequestError(f"{name}={value!r} must be {told}")
        return _plain(name, value, told)
    return value


def _plain(name: str, value: Any, told: str) -> Any:
    """Numpy's numbers are Python's from here on, and 4e9 bytes are 4,000,000,000."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    if isinstance(value, Integral):
        return int(value)
    number = float(value)
    if Integral not in _KINDS[name][0]:
        return number
    if not number.is_integer():
        raise RequestError(f"{name}={value!r} must be {told}")
    return int(number)
