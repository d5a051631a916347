"""What transformers reads from a model folder, silently, offline, with errors of ours.

In: one of transformers' Auto classes, a folder. Out: the config, tokenizer or model in it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from cacheslide_agents.errors import ModelLoadError
from torch_cacheslide.quiet import quiet

DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}


def read_pretrained(auto_class: Any, folder: Path, trouble: str, **options: Any) -> Any:
    """`auto_class.from_pretrained(folder)`. `ModelLoadError` that says `trouble`, and why."""
    try:
        with quiet():
            return auto_class.from_pretrained(folder, local_files_only=True, **options)
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ModelLoadError(f"{folder}: {trouble} ({reason})") from error
