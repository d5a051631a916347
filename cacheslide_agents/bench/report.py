"""Shows a run: a table for the terminal, a page of Markdown for people who were not there.

In: `Results`. Out: a rich `Table` of the main figures, or Markdown text with all of them.
"""

from __future__ import annotations

from statistics import median

from rich.box import SIMPLE_HEAD
from rich.table import Table

from cacheslide_agents.bench.results import PolicySummary, Results, Spread

PAGE_COLUMNS = (
    "policy",
    "TTFT s",
    "vs recompute",
    "vs prefix",
    "hits only",
    "compute",
    "KL mean",
    "KL p95",
    "top-1",
    "F1",
    "EM",
    "hit rate",
    "hit / declined / fallback",
)
_PAGE = """\
# {task} on {model}

{rows} turns, {backend} backend, device {device}, {threads} threads; {versions}.

{table}

- TTFT: median seconds from request to first token, tokenisation and planning included.
- vs recompute, vs prefix: median (smallest to largest) of paired TTFT ratios over all turns; a
  declined turn or a fallback counts with its own time. Hits only: against recompute, other turns
  left out.
- compute: active tokens summed over layers / (prompt tokens x layers). Hit rate: reused / prompt
  tokens over all turns.
- KL: KL(dense || policy), natural logarithm, mean over the dense run's first 16 greedy tokens,
  teacher forced; top-1: share of those tokens whose most likely token agrees.
- `prompt_cache`, `cache_blend` and `epic` reuse chunks that were prefilled alone; `prefix`,
  `cacheslide` and every `_context` policy reuse the previous turn as it was computed in context.
"""


def table(results: Results) -> Table:
    """One line per policy, 80 columns wide; ratios are medians over all turns."""
    title = f"{results.task} on {results.model}, {_turns(results)} turns"
    shown = Table(title=title, box=SIMPLE_HEAD, show_edge=False, padding=0)
    shown.add_column("policy", no_wrap=True)
    for column in ("TTFT s", "x dense", "x prefix", "compute", "KL", "F1", "hits", "decl.", "fell"):
        shown.add_column(column, justify="right", no_wrap=True)
    for name, one in results.summary.items():
        shown.add_row(
            name,
            f"{_ttft(results, name):.2f}",
            _median(one.ttft_speedup_vs_recompute),
            _median(one.ttft_speedup_vs_prefix),
            f"{one.compute_fraction:.3f}",
            f"{one.kl_mean:.4f}",
            _share(one.f1),
            str(one.rows_hit),
            str(one.declined),
            str(one.fallbacks),
        )
    return shown


def markdown(results: Results) -> str:
    """A page with every figure and what it means."""
    lines = [PAGE_COLUMNS, tuple("---" for _ in PAGE_COLUMNS)]
    lines += [
        (name, f"{_ttft(results, name):.3f}", *_figures(one))
        for name, one in results.summary.items()
    ]
    return _PAGE.format(
        task=results.task,
        model=results.model,
        rows=_turns(results),
        backend=results.backend,
        device=results.device,
        threads=results.threads,
        versions=", ".join(f"{name} {one}" for name, one in results.versions.items()),
        table="\n".join(f"| {' | '.join(cells)} |" for cells in lines),
    )


def _turns(results: Results) -> int:
    return len({(row.id, row.turn) for row in results.rows})


def _ttft(results: Results, policy: str) -> float:
    return median(row.ttft_s for row in results.rows if row.policy == policy)


def _figures(one: PolicySummary) -> tuple[str, ...]:
    return (
        _spread(one.ttft_speedup_vs_recompute),
        _spread(one.ttft_speedup_vs_prefix),
        _spread(one.ttft_speedup_hits_only),
        f"{one.compute_fraction:.3f}",
        f"{one.kl_mean:.4f}",
        f"{one.kl_p95:.4f}",
        f"{one.top1:.2f}",
        _share(one.f1),
        _share(one.em),
        f"{one.hit_rate:.2f}",
        f"{one.rows_hit} / {one.declined} / {one.fallbacks}",
    )


def _spread(spread: Spread | None) -> str:
    if spread is None:
        return "-"
    return f"{spread.median:.2f} ({spread.min:.2f} to {spread.max:.2f})"


def _median(spread: Spread | None) -> str:
    return "-" if spread is None else f"{spread.median:.2f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
