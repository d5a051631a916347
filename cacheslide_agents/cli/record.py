"""`cacheslide record`: a model's own answers to an agent's prompts, as a log.

In: the data folder, a model. Out: a log to train a conversion of that model on, or to replay.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Annotated

import typer

from cacheslide_agents.cli import options
from cacheslide_agents.cli.console import notes, waiting
from cacheslide_agents.cli.engine import BackendOptions, with_plain_backend


@with_plain_backend
def record(
    *,
    data: Annotated[Path, typer.Option(help="Folder with hotpotqa/.")],
    out: Annotated[
        Path, typer.Option(parser=options.place("--out"), help="The log; kept and gone on with.")
    ],
    max_tokens: options.MaxTokens = 32,
    max_prompt_tokens: Annotated[int, typer.Option(min=1, help="Longer ones are left out.")] = 4096,
    limit: Annotated[int | None, typer.Option(min=1, help="Prompts at most.")] = None,
    seed: Annotated[int, typer.Option(help="Chooses the passages.")] = 0,
    backend: BackendOptions,
) -> None:
    """Let a model answer every second question of the data, and write a log of it.

    What `cacheslide train --requests` learns from. Run it again to go on.
    """
    from cacheslide_agents.bench.asked import asked
    from cacheslide_agents.bench.record import record as run
    from cacheslide_agents.bench.runner import token_limits
    from cacheslide_agents.prompt.chat import ChatEncoder

    with backend.opened() as loaded:
        limits = token_limits(loaded, ChatEncoder(loaded.tokenizer).encode, max_prompt_tokens)
        prompts = islice(asked(data, limits, seed), limit)
        count = 0
        with waiting("answering") as status:
            for count, name in enumerate(run(loaded, prompts, out, max_tokens), start=1):
                status.update(f"{count} answered, last {name}")
    notes().print(f"{count} answers in {out}")
