"""Whatever goes wrong between us and a server, as one of our errors.

In: an exception of the `openai` client. Out: a `ServerError` that is also LangChain's error of
that kind, so that `with_retry`, `with_fallbacks` and the agent middleware treat it as they treat
every provider's. Neither the message nor a traceback shows the API key.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from langchain_core import exceptions as langchain
from pydantic import SecretStr

from cacheslide_agents.errors import RequestTimeoutError, ServerError


class ServerRequestError(ServerError, langchain.ModelInvalidRequestError):
    """The server does not accept the request (HTTP 400, 422 and other 4xx)."""


class ServerContextOverflowError(ServerRequestError, langchain.ContextOverflowError):
    """The prompt does not fit the window of the server's model."""


class ServerAuthenticationError(ServerError, langchain.ModelAuthenticationError):
    """The API key is missing or wrong (HTTP 401)."""


class ServerPermissionError(ServerError, langchain.ModelPermissionDeniedError):
    """The API key does not allow this (HTTP 403)."""


class ServerNotFoundError(ServerError, langchain.ModelNotFoundError):
    """The server has no such model or path (HTTP 404)."""


class ServerRateLimitError(ServerError, langchain.ModelRateLimitError):
    """The server had too much to do, after all retries (HTTP 429)."""


class ServerFailureError(ServerError, langchain.ModelAPIError):
    """The server failed, or answered what nobody can read (HTTP 5xx)."""


class ServerConnectionError(ServerError, langchain.ModelConnectionError):
    """The server cannot be reached, or went away in the middle of an answer."""


class ServerTimeoutError(ServerError, langchain.ModelTimeoutError):
    """The server had not given its whole answer within `timeout`."""


_BY_STATUS: dict[int, tuple[type[ServerError], str]] = {
    401: (ServerAuthenticationError, "check api_key"),
    403: (ServerPermissionError, "the api_key does not allow this"),
    404: (ServerNotFoundError, "check the model's name and base_url, which mostly ends in /v1"),
    429: (ServerRateLimitError, "it has too much to do; raise max_retries or ask less often"),
}
_OVERFLOW = ("context_length_exceeded", "exceed_context_size", "maximum context length")
_LONGEST_QUOTE = 600


def failure(
    error: Exception,
    *,
    url: str,
    secret: SecretStr | None,
    knobs: Collection[str] = (),
    partial: str = "",
    pieces: int = 0,
) -> ServerError:
    """`error` as ours. `knobs`: settings of the request that OpenAI's own API does not have."""
    import openai

    said = _quote(error, secret)
    status = getattr(error, "status_code", None)
    told: dict[str, Any] = {"status": status, "partial": partial, "pieces": pieces}
    if isinstance(error, openai.APIStatusError):
        return _refusal(error, f"the server at {url} answered {status}: {said}", knobs, told)
    late = isinstance(error, openai.APITimeoutError | RequestTimeoutError)
    if late or _is_named(error, "Timeout"):
        message = f"the server at {url} took too long"
        return ServerTimeoutError(f"{message}{_so_far(pieces, partial)}; raise timeout", **told)
    if pieces:
        message = f"the server at {url} broke off{_so_far(pieces, partial)}: {said}"
        return ServerConnectionError(f"{message}; the text is in the error's `partial`", **told)
    if isinstance(error, openai.APIConnectionError) or _is_named(error, "Protocol", "Connect"):
        message = f"the server at {url} cannot be reached: {said}"
        return ServerConnectionError(f"{message}; is it running, and is base_url right?", **told)
    return ServerFailureError(f"the server at {url} gave no usable answer: {said}", **told)


def _refusal(error: Any, message: str, knobs: Collection[str], told: dict[str, Any]) -> ServerError:
    """The error for an HTTP status that means no."""
    kind, mend = _BY_STATUS.get(error.status_code, (ServerRequestError, ""))
    if error.status_code >= 500:
        kind = ServerFailureError
    elif any(mark in f"{error.code} {error.type} {message}" for mark in _OVERFLOW):
        kind, mend = ServerContextOverflowError, "shorten the prompt"
    elif kind is ServerRequestError and knobs:
        named = [knob for knob in knobs if knob in message] or list(knobs)
        mend = f"not every server knows {', '.join(named)}: leave them at their defaults"
    return kind(f"{message}; {mend}" if mend else message, **told)


def _quote(error: Exception, secret: SecretStr | None) -> str:
    """What the server or the transport said, without the key, which some servers repeat."""
    body = getattr(error, "body", None)
    said = body.get("message") if isinstance(body, dict) else None
    cause = error.__cause__
    text = str(said or (cause if cause and not hasattr(error, "status_code") else error))
    text = text or type(error).__name__
    if secret is not None and secret.get_secret_value():
        text = text.replace(secret.get_secret_value(), "**********")
    return text if len(text) <= _LONGEST_QUOTE else f"{text[:_LONGEST_QUOTE]}..."


def _so_far(pieces: int, partial: str) -> str:
    if not pieces:
        return ""
    return f" after {pieces} piece{'s' * (pieces > 1)} of the answer ({len(partial)} characters)"


def _is_named(error: Exception, *marks: str) -> bool:
    """Transport errors by name: older `openai` clients let them through as they are."""
    return any(mark in type(error).__name__ for mark in marks)
