"""What a command can know of a model without loading its weights.

In: an alias, a local folder or a hub id. Out: the folder with its files, and its tokenizer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cacheslide_agents.errors import BackendError, install_hint
from cacheslide_agents.prompt.tokens import load_tokenizer


def model_folder(model: str) -> Path:
    """Where the model's files lie; an alias is converted, a hub id downloaded."""
    try:
        from torch_cacheslide.locate import locate
    except ImportError as error:
        raise BackendError(
            f"finding model {model!r} needs a package that is not installed ({error}); "
            f"{install_hint('torch')}"
        ) from error
    return locate(model)


def tokenizer_of(model: str) -> Any:
    return load_tokenizer(model_folder(model))
