"""Engine arguments that switch CacheSlide on, and the model they are for.

In: what a user gives. Out: vLLM's `EngineArgs`, and what `cacheslide serve` needs of the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

import torch
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs

from cacheslide_agents.errors import BackendError, ModelNotFoundError, RequestError
from cacheslide_agents.paths import expanded
from vllm_cacheslide.cope.profiles import open_profiles
from vllm_cacheslide.identity import digest_of_weights
from vllm_cacheslide.plugin import CONNECTOR, register
from vllm_cacheslide.settings import Settings
from vllm_cacheslide.storage import check_folder

WORKER = "vllm_cacheslide.worker.CacheSlideWorker"
FORCED_TOKENS = "vllm_cacheslide.forced:ForcedTokens"
OURS = ("kv_transfer_config", "worker_cls", "kv_offloading_size")
"""Options that are not the caller's: they bring our connector, or another one in its place."""
LOCATORS = "cacheslide_agents.models"
"""Entry points that turn a model's name into a folder: aliases, GGUF files, hub ids."""


def engine_args(model: str, extra: Mapping[str, Any], options: Mapping[str, Any]) -> EngineArgs:
    """`extra` are the connector's settings (checked here), `options` any other of `EngineArgs`.

    Raises as `checked`, and `RequestError` for options in `OURS`.
    """
    if taken := sorted(options.keys() & set(OURS)):
        raise RequestError(f"{taken[0]} is set by the backend itself; leave it out")
    ready = checked(model, extra, str(options.get("load_format", "auto")))
    register()
    ours: dict[str, Any] = {
        "kv_transfer_config": KVTransferConfig(**ready.transfer),
        "worker_cls": WORKER,
        "max_logprobs": -1,
        **options,
        "logits_processors": [FORCED_TOKENS, *(options.get("logits_processors") or ())],
    }
    try:
        return EngineArgs(model=ready.model, **ours)
    except TypeError as error:
        raise BackendError(f"vLLM's engine takes no such option: {error}") from error


@dataclass(frozen=True)
class Ready:
    """What an engine can be started with: a folder or hub id, fields of `KVTransferConfig`."""

    model: str
    settings: Settings
    transfer: Mapping[str, Any]


def checked(model: str, extra: Mapping[str, Any], load_format: str = "auto") -> Ready:
    """The connector's settings `extra` and what they name, looked at before anything is started.

    `RequestError` for a setting that is wrong, `StoreError` when the page store's folder cannot be
    had or is no place for this model's contexts; raises as `Profiles` for profiles that are not
    this model's.
    """
    settings, found = Settings.of(extra), located(model)
    check_folder(settings)
    if settings.store_path is not None and isinstance(found, Path):
        digest_of_weights(found, torch.float32, load_format)
    open_profiles(found, settings.profiles)
    transfer = {
        "kv_connector": CONNECTOR,
        "kv_role": "kv_both",
        "kv_connector_extra_config": dict(extra),
        "kv_load_failure_policy": "recompute",
    }
    return Ready(str(found), settings, transfer)


def located(model: str) -> Path | str:
    """The folder that some installed backend finds or makes, else the name, for vLLM to find.

    Raises what the first of them raised, if none has the model, and `BackendError` for one that
    cannot be asked.
    """
    unknown: ModelNotFoundError | None = None
    for entry in entry_points(group=LOCATORS):
        try:
            return _locator(entry)(model)
        except ModelNotFoundError as error:
            unknown = unknown or error
    if unknown is not None:
        raise unknown
    folder = expanded(model, "model")
    return folder if folder.is_dir() else model


def _locator(entry: EntryPoint) -> Callable[[str], Path]:
    try:
        found: Callable[[str], Path] = entry.load()
    except ImportError as error:
        raise BackendError(
            f"{entry.value}, which finds models, needs a package that is not installed ({error}); "
            "install it, or uninstall what brings the entry point"
        ) from error
    return found
