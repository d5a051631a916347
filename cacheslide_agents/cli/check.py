"""`cacheslide check`: one populate and one shifted reuse, compared with dense prefill.

In: a model. Out: what was found, one line each; exit code 1 when something does not hold.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from cacheslide_agents.cli import options
from cacheslide_agents.cli.console import emit
from cacheslide_agents.cli.engine import BackendOptions, with_backend
from cacheslide_agents.cli.exit_codes import DOES_NOT_HOLD


@with_backend
def check(
    *,
    backend: BackendOptions,
    tolerance: Annotated[
        float, typer.Option(help="Largest KL where reuse must equal dense prefill.")
    ] = 1e-3,
    max_kl: Annotated[float, typer.Option(help="Largest KL of a moved prompt.")] = 0.1,
    as_json: options.Json = False,
) -> None:
    """Cache one turn, reuse it for a turn that moved, and compare with dense prefill."""
    from cacheslide_agents.cli.examine import examine

    with backend.opened() as loaded:
        findings = list(examine(loaded, tolerance, max_kl))
    holds = all(finding.holds for finding in findings)
    if as_json:
        found = [asdict(finding) for finding in findings]
        emit({"model": loaded.model_id, "holds": holds, "findings": found})
    else:
        for finding in findings:
            print("ok  " if finding.holds else "FAIL", f"{finding.name}: {finding.detail}")
    if not holds:
        raise typer.Exit(DOES_NOT_HOLD)
