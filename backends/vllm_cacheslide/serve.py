"""`cacheslide serve`: vLLM's own OpenAI-compatible server, with reuse switched on.

In: a model's name, vLLM's flags as given, our settings. Out: a server that runs until it is
stopped. Several API servers in front of one engine work; data parallelism has not been run.
"""

from __future__ import annotations

import json
import os
from argparse import Namespace
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any

from cacheslide_agents.errors import RequestError
from vllm_cacheslide.launch import OURS, WORKER, checked
from vllm_cacheslide.plugin import PLUGIN, register
from vllm_cacheslide.stamp import make_stamp

_OURS = {f"--{name.replace('_', '-')}": name for name in ("model", *OURS)}
"""Flags that are not the user's, and what they are in vLLM's arguments."""

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
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup

    cli_env_setup()
    ServeSubcommand.cmd(parsed(argv, flags))


def arguments(model: str, flags: Sequence[str], settings: Mapping[str, Any]) -> list[str]:
    """vLLM's command line. `RequestError` for flags that we set ourselves; raises as `checked`."""
    for flag in flags:
        _expect_theirs(_name(flag))
    ready = checked(model, settings)
    ours = ["--model", ready.model, "--served-model-name", model]
    ours += ["--kv-transfer-config", json.dumps(ready.transfer), "--worker-cls", WORKER]
    ours += ["--tool-strict-level", "parameter"]  # calls match their schemas, as everywhere here
    if ready.settings.store_path is not None:
        ours += ["--shutdown-timeout", str(WRITING_S)]
    return [*ours, *flags]


def parsed(argv: Sequence[str], flags: Sequence[str]) -> Namespace:
    """What vLLM makes of `argv`, of which the user's `flags` are the end.

    `RequestError` for what it refuses (argparse itself ends the process, with a line that says
    why), and for flags of ours that come in abbreviated, from a file or as a second model.
    """
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser(prog="cacheslide serve"))
    ours = parser.parse_args(list(argv[: len(argv) - len(flags)]))
    try:
        args: Namespace = parser.parse_args(list(argv))
    except IndexError:  # of a flag with a dot in it, whose value is looked for behind it
        raise RequestError(f"{argv[-1]} lacks its value") from None
    except Exception as error:
        raise RequestError(f"vLLM refuses {_named('config', flags)}: {error}") from error
    try:
        validate_parsed_serve_args(args)
    except Exception as error:
        refused = _named(getattr(error, "parameter", None) or "", flags)
        raise RequestError(f"vLLM refuses {refused}: {error}") from error
    if args.model_tag is not None:
        raise RequestError(f"a second model, {args.model_tag!r}; one is served, leave it out")
    for flag, name in _OURS.items():
        if _settled(getattr(args, name)) != _settled(getattr(ours, name)):
            _expect_theirs(flag)
    return args


def _named(parameter: str, flags: Sequence[str]) -> str:
    """The flag that sets `parameter`, if the user has given it."""
    flag = f"--{parameter.replace('_', '-')}"
    return flag if flag in map(_name, flags) else "the flags"


def _name(flag: str) -> str:
    """As vLLM reads it: without a value, and without the part of the value that a dot names."""
    return flag.partition("=")[0].partition(".")[0].replace("_", "-")


def _settled(value: Any) -> Any:
    """Without the id that every connector's configuration is born with."""
    if not hasattr(value, "engine_id"):
        return value
    return {name: each for name, each in vars(value).items() if name != "engine_id"}


def _expect_theirs(flag: str) -> None:
    if flag in _OURS:
        raise RequestError(f"{flag} is set by `cacheslide serve` itself; leave it out")


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
