"""Model folders that are made from other files, once, under the user's cache directory.

In: a folder's name and a function that fills a folder. Out: the folder, whole: it appears by
rename, whoever else makes it at the time, and one that lost a file is made again.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp
from time import perf_counter

from filelock import FileLock

from cacheslide_agents.errors import ModelLoadError
from cacheslide_agents.weights.writing import writing

MANIFEST = "conversion.json"
FORMAT = 1
_logger = logging.getLogger(__name__)


def derived(target: Path, source: Path, fill: Callable[[Path], None]) -> Path:
    """`target`, which `fill` made from `source` when it was first asked for, or does now.

    Raises `ModelLoadError` for a folder that cannot be written, and what `fill` raises.
    """
    if _is_whole(target):
        return target
    what = f"{target}, the converted form of {source},"
    mend = "free some space there, or let CACHESLIDE_HOME name a folder that can be written"
    with writing(what, mend, ModelLoadError):
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(target.parent / f".{target.name}.lock"):
            if not _is_whole(target):
                _publish(target, source, fill)
    return target


def _is_whole(folder: Path) -> bool:
    """Whether every file of the manifest is there with its size."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        sizes = manifest["files"] if manifest["format"] == FORMAT else {}
        return bool(sizes) and all(
            (folder / name).stat().st_size == size for name, size in sizes.items()
        )
    except (OSError, AttributeError, KeyError, RecursionError, TypeError, ValueError):
        return False


def _publish(target: Path, source: Path, fill: Callable[[Path], None]) -> None:
    """Fill a folder beside `target` and rename it; called by one process at a time."""
    began = perf_counter()
    _logger.warning("converting %s to %s, once; this takes up to a minute", source, target)
    for left_over in target.parent.glob(f".{target.name}.*.tmp"):
        shutil.rmtree(left_over, ignore_errors=True)
    folder = Path(mkdtemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent))
    try:
        fill(folder)
        _seal(folder)
        shutil.rmtree(target, ignore_errors=True)
        folder.rename(target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    _logger.info("converted %s in %.0f s", source.name, perf_counter() - began)


def _seal(folder: Path) -> None:
    """Write the manifest and force everything to disk, so that a rename publishes whole files."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    manifest = {"format": FORMAT, "files": {path.name: path.stat().st_size for path in files}}
    written = folder / MANIFEST
    written.write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    for path in (*files, written):
        with path.open("rb+") as stream:
            os.fsync(stream.fileno())
