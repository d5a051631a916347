"""`cacheslide serve`: vLLM's own OpenAI-compatible server, with reuse switched on.

In: a model's name, vLLM's flags as given, our settings. Out: a server that runs until it is
stopped. Whatever vLLM's `serve` can do (several API servers, data parallelism), this one can.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any

from cacheslide_agents.errors import RequestError
from vllm_cacheslide.launch import WORKER, checked
from vllm_cacheslide.plugin import PLUGIN, register
from vllm_cacheslide.stamp import make_stamp

_OURS = ("--model", "--kv-transfer-config", "--worker-cls")
WRITING_S = 60
"""Seconds that a server may take to end, so that its workers can write what they have stored; vLLM
would kill them at once. A flag or a variable of the user's replaces it."""
_GROUPS = ("general", "io_processor", "platform", "stat_logger")


def serve(model: str, flags: Sequence[str], settings: Mapping[str, Any]) -> None:
    """`model`: alias, local folder or hub id; clients know it by that name.

    Raises as `arguments`.
    """
    argv = arguments(model, flags, settings)
    os.environ.setdefault("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", str(WRITING_S))
    os.environ["VLLM_PLUGINS"] = ",".join(plugins(os.environ.get("VLLM_PLUGINS")))
    make_stamp()
    register()
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_env_setup()
    args = make_arg_parser(FlexibleArgumentParser(prog="cacheslide serve")).parse_args(argv)
    validate_parsed_serve_args(args)
    ServeSubcommand.cmd(args)


def arguments(model: str, flags: Sequence[str], settings: Mapping[str, Any]) -> list[str]:
    """vLLM's command line. `RequestError` for flags that we set ourselves; raises as `checked`."""
    for flag in flags:
        if (name := flag.partition("=")[0].replace("_", "-")) in _OURS:
            raise RequestError(f"{name} is set by `cacheslide serve` itself; leave it out")
    ready = checked(model, settings)
    ours = ["--model", ready.model, "--served-model-name", model]
    ours += ["--kv-transfer-config", json.dumps(ready.transfer), "--worker-cls", WORKER]
    ours += ["--tool-strict-level", "parameter"]  # calls match their schemas, as everywhere here
    if ready.settings.store_path is not None:
        ours += ["--shutdown-timeout", str(WRITING_S)]
    return [*ours, *flags]


def plugins(allowed: str | None) -> list[str]:
    """What `VLLM_PLUGINS` must name: what it allows, which is everything if unset, and ours.

    vLLM loads plugins with routes only by name, and a list of names holds for all its plugins.
    """
    if allowed is not None:
        names = {name for name in allowed.split(",") if name}
    else:
        groups = (entry_points(group=f"vllm.{group}_plugins") for group in _GROUPS)
        names = {entry.name for group in groups for entry in group}
    return sorted({*names, PLUGIN})
