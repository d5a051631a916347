"""Files that hold tensors, written.

In: what is written, and what to do where it cannot be. Out: nothing, or one error of ours. A full
disk is an `OSError` to Python and an exception of its own to safetensors, which is none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from cacheslide_agents.errors import CacheSlideError, DataError


@contextmanager
def writing(what: str | Path, mend: str, kind: type[CacheSlideError] = DataError) -> Iterator[None]:
    """What the disk refuses inside is an error of `kind`: "`what` cannot be written; `mend`"."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise kind(f"{what} cannot be written ({error}); {mend}") from error


def save_tensors(
    tensors: Mapping[str, Tensor], path: Path, mend: str, metadata: Mapping[str, str] | None = None
) -> None:
    """As one safetensors file, which is not left behind in part. `DataError` says `mend`."""
    try:
        with writing(path, mend):
            save_file(dict(tensors), path, metadata=None if metadata is None else dict(metadata))
    except DataError:
        path.unlink(missing_ok=True)
        raise
