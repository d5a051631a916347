"""An agent's calls on a terminal, as they end.

In: calls. Out: a line for each: what was asked, the time to its first token, what was reused, and
the answer that the agent heard.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape

from langchain_cacheslide.agents.calls import Call

_COLOURS = {"hit": "green", "partial": "green", "fallback": "red"}
_SHOWN = 160
"""Characters of an answer."""


def call_line(call: Call) -> str:
    """One call, in rich's markup."""
    heard = call.text if call.recorded is None else call.recorded
    answer = " ".join(heard.split())
    shown = answer if len(answer) <= _SHOWN else f"{answer[:_SHOWN]}..."
    mark = "" if call.recorded is None else "[dim](recorded)[/] "
    return f"[bold]{call.step:<8}[/] {_receipt(call.receipt)}\n         {mark}{escape(shown)}"


def sum_line(calls: Sequence[Call]) -> str:
    """What all calls took and reused together."""
    known = [call.receipt for call in calls if call.receipt]
    first = sum(receipt["ttft_s"] for receipt in known)
    reused = sum(receipt["reused_tokens"] for receipt in known)
    prompts = sum(receipt["prompt_tokens"] for receipt in known)
    seconds = sum(call.seconds for call in calls)
    return (
        f"{len(calls)} calls in {seconds:.1f} s, {first:.1f} s of it for first tokens; "
        f"{reused} of {prompts} prompt tokens reused"
    )


def printer(console: Console) -> Callable[[Call], None]:
    """What a `CallLog` tells of each call: `CallLog(printer(console))`."""
    return lambda call: console.print(call_line(call), highlight=False)


def _receipt(receipt: dict[str, Any]) -> str:
    if not receipt:
        return "no receipt"
    outcome = receipt["outcome"]
    colour = _COLOURS.get(outcome, "yellow")
    why = receipt["reason"] or ""
    reason = "" if why in ("", outcome) else f" ({escape(why)})"
    tokens = f"{receipt['reused_tokens']:>5} of {receipt['prompt_tokens']:>5} tokens reused"
    return f"first token {receipt['ttft_s']:6.2f} s  {tokens}  [{colour}]{outcome}[/]{reason}"
