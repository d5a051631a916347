"""Engine arguments that switch CacheSlide on, and the model they are for.

In: what a user gives. Out: vLLM's `EngineArgs`. `cacheslide serve` needs the same ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs

from cacheslide_agents.errors import BackendError
from vllm_cacheslide.cope.profiles import open_profiles
from vllm_cacheslide.plugin import CONNECTOR, register
from vllm_cacheslide.settings import Settings
from vllm_cacheslide.storage import check_folder

WORKER = "vllm_cacheslide.worker.CacheSlideWorker"
FORCED_TOKENS = "vllm_cacheslide.forced:ForcedTokens"
LOCATORS = "cacheslide_agents.models"
"""Entry points that turn a model's name into a folder: aliases, GGUF files, hub ids."""


def engine_args(model: str, extra: Mapping[str, Any], options: Mapping[str, Any]) -> EngineArgs:
    """`extra` are the connector's settings (checked here), `options` any of `EngineArgs`.

    `StoreError` when the page store's folder cannot be had; raises as `Profiles` for profiles that
    are not this model's.
    """
    settings, folder = Settings.of(extra), located(model)
    check_folder(settings)
    open_profiles(folder, settings.profiles)
    register()
    transfer = KVTransferConfig(
        kv_connector=CONNECTOR,
        kv_role="kv_both",
        kv_connector_extra_config=dict(extra),
        kv_load_failure_policy="recompute",
    )
    ours: dict[str, Any] = {
        "kv_transfer_config": transfer,
        "worker_cls": WORKER,
        "logits_processors": [FORCED_TOKENS],
        "max_logprobs": -1,
    }
    try:
        return EngineArgs(model=str(folder), **(ours | dict(options)))
    except TypeError as error:
        raise BackendError(f"vLLM's engine takes no such option: {error}") from error


def located(model: str) -> Path | str:
    """A folder if some installed backend can find or make one, else the name, for vLLM to find."""
    for entry in entry_points(group=LOCATORS):
        found: Path = entry.load()(model)
        return found
    folder = Path(model).expanduser()
    return folder if folder.is_dir() else model
