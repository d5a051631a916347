"""The options that several commands share, declared once.

In: nothing. Out: annotated types for typer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

DEFAULT_MODEL = "smollm2-135m"
DEFAULT_BACKEND = "torch"

Model = Annotated[str, typer.Option("--model", "-m", help="Alias, local folder or hub id.")]
BackendName = Annotated[str, typer.Option("--backend", help="Name of an installed backend.")]
Device = Annotated[str | None, typer.Option(help="cpu or cuda; left to the backend by default.")]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16, ...; likewise.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Compute threads; likewise.")]
Policy = Annotated[
    str | None, typer.Option(help="Reuse policy: cacheslide, prefix, recompute, ...")
]
MaxTokens = Annotated[int, typer.Option(min=1, help="New tokens at most.")]
Temperature = Annotated[float, typer.Option(min=0.0, help="0 is greedy.")]
TopP = Annotated[float, typer.Option(help="Nucleus sampling; 1 switches it off.")]
TopK = Annotated[int, typer.Option(min=0, help="Top-k sampling; 0 switches it off.")]
Seed = Annotated[int | None, typer.Option(help="Seed of the sampling.")]
Stop = Annotated[list[str] | None, typer.Option(help="Stop text; may be given several times.")]
System = Annotated[str | None, typer.Option(help="System message.")]
Values = Annotated[
    str | None, typer.Option(help="JSON file with the template's values; - reads stdin.")
]
Json = Annotated[bool, typer.Option("--json", help="One JSON value on stdout and nothing else.")]
Out = Annotated[Path | None, typer.Option(help="Where to write the JSON, after every row.")]
