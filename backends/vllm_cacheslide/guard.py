"""No hook of ours may raise: in vLLM that would end the engine for everybody.

In: a connector method. Out: the same, whose errors are logged and answered by a harmless value.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

from vllm.logger import init_logger

log = init_logger("vllm.cacheslide")

Hook = TypeVar("Hook", bound=Callable[..., Any])


def guarded(otherwise: Callable[[], Any]) -> Callable[[Hook], Hook]:
    """Decorate a hook; `otherwise()` is what it answers when it fails."""

    def decorate(hook: Hook) -> Hook:
        @wraps(hook)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return hook(*args, **kwargs)
            except Exception:
                log.exception("CacheSlide: hook %s failed", hook.__name__)
                return otherwise()

        return cast(Hook, call)

    return decorate
