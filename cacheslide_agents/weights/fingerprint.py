"""What tells two models' keys and values apart, at the price of a few megabytes read.

In: a model folder, and the dtype it is used in. Out: a 128-bit hex digest. Equal weights in another
folder, or cut into other files, have the same one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

import torch

from cacheslide_agents.weights.checkpoint import TensorEntry, read_config, tensor_entries

SAMPLE_BYTES = 16 << 20
BLOCK_BYTES = 4096
FORMAT = "1|{}|1|0"
"""Stores, profiles and unfinished training runs know their model by digests that begin with it."""
# Fields of config.json that say who wrote it, or how it was loaded, not what is computed.
_NOT_COMPUTED = frozenset(
    {
        "_attn_implementation",
        "_model_name_or_path",
        "_name_or_path",
        "architectures",
        "auto_map",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "pad_token_id",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)

Ranges = Iterator[tuple[int, int]]


def fingerprint(folder: Path, dtype: torch.dtype) -> str:
    """Digest of what K and V depend on: config, tensor names, shapes and bytes, dtype.

    Up to `SAMPLE_BYTES` of tensors are read: small models whole, of a large one evenly spread
    blocks of every tensor (the first and the last bytes always), so that a fine-tune differs but
    one changed number in the middle of a large tensor may not.
    """
    digest = blake2b(digest_size=16)
    digest.update(FORMAT.format(dtype).encode())
    _add_config(digest, read_config(folder))
    _add_folder(digest, folder)
    return digest.hexdigest()


def file_digest(path: Path) -> str:
    """Digest of one file: its size and evenly spread blocks, `SAMPLE_BYTES` at most."""
    size = path.stat().st_size
    digest = blake2b(str(size).encode(), digest_size=16)
    with path.open("rb") as stream:
        for start, stop in _sampled(size, SAMPLE_BYTES):
            digest.update(_read(stream, start, stop))
    return digest.hexdigest()


def _add_config(digest: blake2b, config: Mapping[str, Any]) -> None:
    computed = {name: value for name, value in config.items() if name not in _NOT_COMPUTED}
    digest.update(json.dumps(computed, sort_keys=True, default=str).encode())


def _add_folder(digest: blake2b, folder: Path) -> None:
    entries = tensor_entries(folder)
    share = _share(sum(entry.stop - entry.start for entry in entries.values()), len(entries))
    streams: dict[Path, BinaryIO] = {}
    try:
        for name, entry in entries.items():
            if entry.file not in streams:
                streams[entry.file] = entry.file.open("rb")
            digest.update(f"|{name}|{entry.dtype}|{entry.shape}|".encode())
            _add_entry(digest, streams[entry.file], entry, share)
    finally:
        for stream in streams.values():
            stream.close()


def _add_entry(digest: blake2b, stream: BinaryIO, entry: TensorEntry, share: int) -> None:
    for start, stop in _sampled(entry.stop - entry.start, share):
        digest.update(_read(stream, entry.start + start, entry.start + stop))


def _share(total: int, tensors: int) -> int:
    """Bytes to read of each tensor; no limit when all of them fit."""
    return total if total <= SAMPLE_BYTES else max(BLOCK_BYTES, SAMPLE_BYTES // max(tensors, 1))


def _sampled(size: int, share: int) -> Ranges:
    """Ascending byte ranges of about `share` bytes in all, the first and last bytes among them."""
    if size <= share:
        yield 0, size
        return
    blocks = max(2, share // BLOCK_BYTES)
    length = share // blocks
    for block in range(blocks):
        start = (size - length) * block // (blocks - 1)
        yield start, start + length


def _read(stream: BinaryIO, start: int, stop: int) -> bytes:
    stream.seek(start)
    return stream.read(stop - start)
