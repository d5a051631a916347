"""Errors of a backend in this process that LangChain has a kind for.

In: one of our errors. Out: the same, which is also LangChain's, so that its middleware treats it as
every provider's (a summary where the prompt is too long, another try after a timeout).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from langchain_core import exceptions as langchain

from cacheslide_agents.errors import ContextOverflowError, RequestTimeoutError


class LocalContextOverflowError(ContextOverflowError, langchain.ContextOverflowError):
    """The prompt does not fit the model's window."""


class LocalTimeoutError(RequestTimeoutError, langchain.ModelTimeoutError):
    """The answer was not whole within `timeout`."""


@contextmanager
def as_langchain() -> Iterator[None]:
    try:
        yield
    except ContextOverflowError as error:
        told = (error.prompt_tokens, error.max_model_len, error.new_tokens)
        raise LocalContextOverflowError(*told) from error
    except RequestTimeoutError as error:
        raise LocalTimeoutError(error.seconds) from error
