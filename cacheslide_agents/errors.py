"""Every error the library raises on purpose; each message names the thing, the place and the mend.

CacheSlideError
├── PromptError              a prompt cannot be built
│   ├── TemplateError        a Jinja template is wrong, with file and line
│   ├── TokenizerError       a tokenizer is missing or does not fit
│   └── ContextOverflowError the prompt does not fit the model's window
├── RequestError             a parameter of one request is out of range
├── RequestTimeoutError      an answer took longer than the request allowed
├── ModelError               a model cannot be used
│   ├── ModelNotFoundError   no such alias, folder or hub id
│   ├── ModelLoadError       files are missing, truncated or hold non-finite weights
│   └── UnsupportedModelError  architecture, position scheme or layer type we do not handle
├── BackendError             unknown or closed backend, or one whose packages are not installed
│   └── ServerError          a model server refused, failed, fell silent or went away
├── StoreError               a page store cannot be opened or written: locked, full, newer format
├── DataError                benchmark or input data is missing or malformed
└── ReuseError               reuse of one request went wrong; always answered by dense prefill
    ├── PageError            a cached page is missing, torn or foreign
    └── NonFiniteError       NaN or infinity met in cached or corrected keys and values
"""

from __future__ import annotations


class CacheSlideError(Exception):
    """Base of all errors below."""


class PromptError(CacheSlideError):
    pass


class TemplateError(PromptError):
    """A template is wrong. `path` and `line` say where (line counts from 1)."""

    def __init__(self, message: str, *, path: str = "<string>", line: int | None = None) -> None:
        self.path = path
        self.line = line
        where = path if line is None else f"{path}:{line}"
        super().__init__(f"{where}: {message}")


class TokenizerError(PromptError):
    pass


class ContextOverflowError(PromptError):
    """The prompt, plus the new tokens it needs room for, is longer than the model's window."""

    def __init__(self, prompt_tokens: int, max_model_len: int, new_tokens: int = 1) -> None:
        self.prompt_tokens = prompt_tokens
        self.max_model_len = max_model_len
        self.new_tokens = new_tokens
        super().__init__(
            f"the prompt has {prompt_tokens} tokens but the model's window is {max_model_len} "
            f"and needs room for {new_tokens} new one{'s' if new_tokens > 1 else ''}; "
            "shorten the prompt"
        )


class RequestError(CacheSlideError):
    pass


class RequestTimeoutError(CacheSlideError, TimeoutError):
    """The answer was not whole after `seconds`, and was given up."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        super().__init__(
            f"the answer was not whole after {seconds:g} s and was given up; raise `timeout` or "
            "lower `max_tokens`"
        )


class ModelError(CacheSlideError):
    pass


class ModelNotFoundError(ModelError):
    pass


class ModelLoadError(ModelError):
    pass


class UnsupportedModelError(ModelError):
    pass


class BackendError(CacheSlideError):
    pass


class ServerError(BackendError):
    """A model server refused, failed, fell silent or went away.

    `status`: the HTTP status, `None` without one. `partial`: the text that had come until then, in
    `pieces` pieces; most servers send one piece per token.
    """

    def __init__(
        self, message: str, *, status: int | None = None, partial: str = "", pieces: int = 0
    ) -> None:
        self.status = status
        self.partial = partial
        self.pieces = pieces
        super().__init__(message)


class StoreError(CacheSlideError):
    pass


class DataError(CacheSlideError):
    pass


class ReuseError(CacheSlideError):
    pass


class PageError(ReuseError):
    pass


class NonFiniteError(ReuseError):
    pass


def install_hint(extra: str) -> str:
    """How a user gets the packages of one of this project's extras."""
    return (
        f"install this project with its extra {extra!r}: pip install 'cacheslide-agents[{extra}]', "
        f"or pip install '.[{extra}]' in its folder"
    )
