"""Silence for libraries that draw bars and log while they load; errors still come as exceptions."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr
from threading import RLock
from typing import Any

from transformers.utils import logging

_transformers_logging: Any = logging  # its switches are not typed

# What is switched off belongs to the process: two loads at once would restore each other's silence.
_ONE_AT_A_TIME = RLock()


@contextmanager
def quiet(*, stderr: bool = False) -> Iterator[None]:
    """transformers' bars, log lines and warnings are off inside, and as they were after.

    `stderr=True` also drops what is written to `sys.stderr`, for bars that have no switch.
    """
    with _ONE_AT_A_TIME, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        verbosity = _transformers_logging.get_verbosity()
        bars = _transformers_logging.is_progress_bar_enabled()
        _transformers_logging.set_verbosity_error()
        _transformers_logging.disable_progress_bar()
        try:
            with redirect_stderr(io.StringIO()) if stderr else nullcontext():
                yield
        finally:
            _transformers_logging.set_verbosity(verbosity)
            if bars:
                _transformers_logging.enable_progress_bar()
