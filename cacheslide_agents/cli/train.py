"""`cacheslide train`: a RoPE model becomes a CoPE model.

In: a base model, text, an output folder. Out: the converted model and its card; progress on stderr.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from cacheslide_agents.cli import options
from cacheslide_agents.cli.console import description, emit, notes, screen
from cacheslide_agents.errors import RequestError

if TYPE_CHECKING:
    from cacheslide_agents.training.convert import Report
    from cacheslide_agents.training.evaluate import HeldOut

STEPS_A_LINE = 20
"""Where no bar can be drawn, a line is printed this often."""


def train(
    text: Annotated[list[Path], typer.Option(help="JSONL with a `text` field; may repeat.")],
    valid: Annotated[list[Path], typer.Option(help="Held-out text, likewise.")],
    out: Annotated[
        Path,
        typer.Option(parser=options.place("--out"), help="Folder for checkpoints and the result."),
    ],
    requests: Annotated[
        list[Path] | None,
        typer.Option(help="Logs of an agent's requests with answers (docs/traces.md), likewise."),
    ] = None,
    model: options.Model = options.DEFAULT_MODEL,
    tokens: Annotated[int, typer.Option(min=0, help="For attention transfer.")] = 600_000,
    distil_tokens: Annotated[int, typer.Option(min=0, help="For distillation after it.")] = 0,
    lengths: Annotated[str, typer.Option(help="Window lengths, with commas.")] = "1024,512,2048",
    sequences: Annotated[int, typer.Option(min=1, help="Windows per step.")] = 1,
    adapter_rank: Annotated[
        int | None, typer.Option(min=1, help="Train low-rank adapters instead of all weights.")
    ] = None,
    start: Annotated[
        Path | None, typer.Option(help="Folder of an adapter to go on from, e.g. to distil it.")
    ] = None,
    npos: Annotated[int, typer.Option(min=2, help="Positions per head.")] = 64,
    learning_rate: Annotated[float, typer.Option(help="Of the projections.")] = 5e-4,
    embedding_rate: Annotated[float, typer.Option(help="Of the position embeddings.")] = 1e-2,
    distil_rate: Annotated[float, typer.Option(help="Of the projections in distillation.")] = 5e-5,
    request_share: Annotated[float, typer.Option(help="Of the tokens, if --requests.")] = 0.67,
    longest_request: Annotated[
        int, typer.Option(help="Longer ones, in tokens, are left out.")
    ] = 4096,
    answer_weight: Annotated[float, typer.Option(help="Of what a request teaches.")] = 0.5,
    seed: int = 0,
    checkpoint_every: Annotated[int, typer.Option(min=1, help="Steps between checkpoints.")] = 20,
    device: options.Device = None,
    dtype: options.Dtype = None,
    threads: options.Threads = None,
    as_json: options.Json = False,
) -> None:
    """Convert a Llama model to contextual positions (CoPE). Run it again to go on."""
    import torch

    from cacheslide_agents.training.recipe import Recipe
    from cacheslide_agents.training.run import Job
    from cacheslide_agents.training.run import train as run
    from torch_cacheslide.threads import set_threads

    if threads is not None:
        set_threads(threads)
    recipe = Recipe(
        transfer_tokens=tokens,
        distil_tokens=distil_tokens,
        lengths=_lengths(lengths),
        sequences=sequences,
        npos=npos,
        learning_rate=learning_rate,
        distil_rate=distil_rate,
        embedding_rate=embedding_rate,
        adapter_rank=adapter_rank,
        seed=seed,
        request_share=request_share,
        longest_request=longest_request,
        answer_weight=answer_weight,
    )
    job = Job(
        model=model,
        train_files=text,
        valid_files=valid,
        requests=requests or (),
        out=out,
        recipe=recipe,
        start=start,
        device=device or ("cuda" if torch.cuda.is_available() else "cpu"),
        dtype=dtype or "float32",
        checkpoint_every=checkpoint_every,
    )
    with _progress(recipe.transfer_tokens + recipe.distil_tokens) as report:
        held_out = run(job, report)
    if as_json:
        emit({"schema": 1, "out": str(out), "held_out": [asdict(each) for each in held_out]})
    else:
        screen().print(_table(held_out))
        notes().print(f"written to {out}")


def _lengths(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise RequestError(f"--lengths {text!r} must be whole numbers with commas") from None


@contextmanager
def _progress(total: int) -> Iterator[Callable[[Report], None]]:
    columns = (
        description(),
        BarColumn(),
        TextColumn("{task.fields[speed]}"),
        TimeRemainingColumn(),
    )
    console = notes()
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        row = bar.add_task("loading", total=total, speed="")

        def update(report: Report) -> None:
            speed = report.tokens / max(report.seconds, 1e-9)
            label = f"{report.phase} {report.step}/{report.steps}, loss {report.loss:.4f}"
            bar.update(
                row, completed=report.tokens, description=label, speed=f"{speed:.0f} tokens/s"
            )
            if not console.is_terminal and report.step % STEPS_A_LINE == 0:
                console.print(f"{label}, {speed:.0f} tokens/s")

        yield update


def _table(held_out: list[HeldOut]) -> Table:
    table = Table("length", "windows", "NLL original", "NLL converted", "change", "KL")
    for each in held_out:
        change = each.nll / each.nll_original - 1.0
        figures = (
            f"{each.nll_original:.4f}",
            f"{each.nll:.4f}",
            f"{change:+.2%}",
            f"{each.kl:.4f}",
        )
        table.add_row(str(each.length), str(each.windows), *figures)
    return table
