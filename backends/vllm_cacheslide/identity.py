"""What tells the keys and values of two engines apart, without reading their weights.

In: vLLM's config. Out: a 128-bit hex digest, alike in the scheduler's process and in every worker.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def fingerprint(config: VllmConfig) -> str:
    """Digest of the model's name, revision, files and config, of dtype and tensor-parallel size.

    A local folder's weight files count with name, size and time of change.
    """
    model = config.model_config
    parts = [
        str(model.model),
        str(model.revision),
        str(model.dtype),
        str(model.quantization),
        str(config.parallel_config.tensor_parallel_size),
        json.dumps(model.hf_config.to_dict(), sort_keys=True, default=str),
        *_files(Path(model.model)),
    ]
    return blake2b("|".join(parts).encode(), digest_size=16).hexdigest()


def _files(folder: Path) -> Iterator[str]:
    for path in sorted(folder.glob("*.safetensors")):
        seen = path.stat()
        yield f"{path.name}:{seen.st_size}:{seen.st_mtime_ns}"
