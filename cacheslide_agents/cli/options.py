"""The options that several commands share, declared once.

In: nothing. Out: annotated types for typer, and what gives a command many of them at once, such as
`sampled`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from cacheslide_agents.paths import expanded
from cacheslide_agents.sampling import Sampling

Command = Callable[..., None]
Decorator = Callable[[Command], Command]


def place(option: str) -> Callable[[str], Path]:
    """What reads the paths of `option`. `Path` itself takes an empty one for the current folder."""

    def path(text: str) -> Path:
        return expanded(text, option)

    return path


DEFAULT_MODEL = "smollm2-135m"
COPE_MODEL = "smollm2-135m-cope"
DEFAULT_BACKEND = "torch"

Model = Annotated[str, typer.Option("--model", "-m", help="Alias, local folder or hub id.")]
BackendName = Annotated[str, typer.Option("--backend", help="Name of an installed backend.")]
Device = Annotated[str | None, typer.Option(help="cpu or cuda; left to the backend by default.")]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16, ...; likewise.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Compute threads; likewise.")]
Profiles = Annotated[
    list[Path] | None,
    typer.Option(
        parser=place("--profiles"),
        help="CCPE profiles of a CoPE model: a file, or a folder; may repeat.",
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="Any other option of the backend, e.g. enforce_eager=true; may repeat.",
    ),
]
Policy = Annotated[
    str | None, typer.Option(help="Reuse policy: cacheslide, prefix, recompute, ...")
]
MaxTokens = Annotated[int, typer.Option(min=1, help="New tokens at most.")]
Temperature = Annotated[float, typer.Option(min=0.0, help="0 is greedy.")]
TopP = Annotated[float, typer.Option(help="Nucleus sampling; 1 switches it off.")]
TopK = Annotated[int, typer.Option(min=0, help="Top-k sampling; 0 switches it off.")]
MinP = Annotated[float, typer.Option(help="Least probability relative to the best; 0: off.")]
Penalty = Annotated[float, typer.Option(help="Above 1: less repetition; 1 switches it off.")]
Beams = Annotated[int, typer.Option(min=1, help="Above 1: beam search instead of sampling.")]
LengthPenalty = Annotated[float, typer.Option(help="Of beam search; above 0 favours length.")]
Seed = Annotated[int | None, typer.Option(help="Seed of the sampling.")]
Stop = Annotated[list[str] | None, typer.Option(help="Stop text; may be given several times.")]
System = Annotated[str | None, typer.Option(help="System message.")]
Values = Annotated[
    str | None, typer.Option(help="JSON file with the template's values; - reads stdin.")
]
Json = Annotated[bool, typer.Option("--json", help="One JSON value on stdout and nothing else.")]
Out = Annotated[
    Path | None,
    typer.Option(parser=place("--out"), help="Where to write the JSON, after every row."),
]


def grouped(name: str, build: Callable[..., object], **defaults: object) -> Decorator:
    """What gives a command the options of `build` in place of its parameter `name`.

    The command gets what `build` makes of them. `defaults` stand in for those of `build`.
    """
    options = signature(build).parameters
    ours = [
        each.replace(default=defaults.get(option, each.default)) for option, each in options.items()
    ]
    hints = get_type_hints(build, include_extras=True)

    def decorate(command: Command) -> Command:
        @wraps(command)
        def run(**values: Any) -> None:
            given = {option: values.pop(option) for option in options}
            command(**values, **{name: build(**given)})

        own = get_type_hints(command, include_extras=True) | hints
        parameters: list[Parameter] = []
        for each in signature(command).parameters.values():
            parameters += ours if each.name == name else [each]
        parameters = [
            each.replace(kind=Parameter.KEYWORD_ONLY, annotation=own[each.name])
            for each in parameters
        ]
        run.__dict__["__signature__"] = Signature(parameters)
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        return run

    return decorate


def _sampling(
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    min_p: MinP = 0.0,
    repetition_penalty: Penalty = 1.0,
    beams: Beams = 1,
    length_penalty: LengthPenalty = 1.0,
    seed: Seed = None,
    stop: Stop = None,
) -> Sampling:
    return Sampling(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        num_beams=beams,
        length_penalty=length_penalty,
        seed=seed,
        stop=tuple(stop or ()),
    )


sampled = grouped("sampling", _sampling)
"""Gives a command all options of sampling."""
