"""The benchmark's JSON (schema 1): typed, validated when read, replaced atomically when written.

In: measured rows, or a file of an earlier run. Out: `Results`, or that file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from cacheslide_agents.errors import DataError
from cacheslide_agents.foreign_json import parsed

SCHEMA = 1
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Row:
    """One policy on one turn. Times in seconds; `f1` and `em` are `None` without a gold answer.

    `first_change` is the first token index that differs from the previous turn's prompt.
    """

    id: str
    turn: int
    policy: str
    prompt_tokens: int
    first_change: int
    reused_tokens: int
    active_tokens: int
    compute_fraction: float
    populate_s: float
    ttft_s: float
    kl: float
    top1: float
    answer: str | None
    f1: float | None
    em: float | None
    outcome: str
    reason: str
    bytes_written: int
    peak_kv_bytes: int


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, smallest and largest of paired ratios."""

    median: float
    min: float
    max: float


@dataclass(frozen=True, slots=True)
class PolicySummary:
    """One policy over all rows. Means are over rows; `kl_p95` interpolates linearly.

    `hit_rate` = reused / prompt tokens, both summed over all rows. `ttft_speedup_hits_only` is
    against recompute, on rows whose outcome is `hit` or `partial`; `None` without such a row.
    """

    ttft_speedup_vs_recompute: Spread | None
    ttft_speedup_vs_prefix: Spread | None
    ttft_speedup_hits_only: Spread | None
    compute_fraction: float
    kl_mean: float
    kl_p95: float
    top1: float
    f1: float | None
    em: float | None
    hit_rate: float
    rows_hit: int
    fallbacks: int
    declined: int


@dataclass(frozen=True, slots=True)
class Results:
    """One run of one workload."""

    task: str
    model: str
    backend: str
    device: str
    threads: int
    versions: Mapping[str, str]
    rows: tuple[Row, ...]
    summary: Mapping[str, PolicySummary]

    def to_dict(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **asdict(self), "rows": [asdict(row) for row in self.rows]}


def read_results(path: str | Path) -> Results:
    """The results in `path`; `DataError` names the key that does not fit the schema."""
    return results_of(read_json(path), str(path))


def results_of(read: Mapping[str, Any], where: str) -> Results:
    """The same of a file that was read; `where` names it."""
    found = dict(read)
    if found.pop("schema", None) != SCHEMA or "study" in found:
        raise DataError(f"{where} is not a benchmark result of schema {SCHEMA}")
    rows, summary = found.get("rows"), found.get("summary")
    if not isinstance(rows, list) or not isinstance(summary, dict):
        raise DataError(f"{where}: 'rows' must be a list and 'summary' an object")
    found["rows"] = tuple(_row(row, f"{where}: rows[{i}]") for i, row in enumerate(rows))
    found["summary"] = {name: _summary(one, f"{where}: {name}") for name, one in summary.items()}
    if lost := sorted(found["summary"].keys() - {row.policy for row in found["rows"]}):
        raise DataError(f"{where}: the summary's {lost[0]!r} has no row")
    return _typed(Results, found, where)


def read_json(path: str | Path) -> dict[str, Any]:
    """The JSON object in `path`, or `DataError`; a number that is not finite is no JSON."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not JSON: {error}") from error
    found = parsed(text, str(path), finite=True)
    if not isinstance(found, dict):
        raise DataError(f"{path} must hold a JSON object")
    return found


def write_json(path: str | Path, value: Mapping[str, Any]) -> None:
    """Replace `path` in one step, so that a killed run leaves the last complete file."""
    target = Path(path)
    try:
        text = json.dumps(value, indent=1, allow_nan=False, ensure_ascii=False)
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = target.with_name(f".{target.name}.{os.getpid()}")
        draft.write_text(text + "\n", encoding="utf-8")
        os.replace(draft, target)
    except (OSError, ValueError) as error:  # an empty name, or a figure that is not finite
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{str(path)!r} cannot be written: {reason}") from error


def _row(value: Any, where: str) -> Row:
    """Nothing that a row counts or times is below 0, and every prompt has a token."""
    row = _typed(Row, value, where)
    for name, one in asdict(row).items():
        least = 1 if name == "prompt_tokens" else 0
        if isinstance(one, int | float) and one < least:
            raise DataError(f"{where}: {name!r} is {one!r}; it must be at least {least}")
    return row


def _summary(value: Any, where: str) -> PolicySummary:
    if isinstance(value, dict):
        spreads = {key: one for key, one in value.items() if key.startswith("ttft_speedup")}
        value = value | {
            key: None if one is None else _typed(Spread, one, f"{where}: {key}")
            for key, one in spreads.items()
        }
    return _typed(PolicySummary, value, where)


def _typed(kind: type[T], value: Any, where: str) -> T:
    """`kind(**value)` after checking that keys and JSON types are those of its fields."""
    if not isinstance(value, dict):
        raise DataError(f"{where} must be an object, not {type(value).__name__}")
    hints = get_type_hints(kind)
    odd = sorted(hints.keys() ^ value.keys())
    if odd:
        raise DataError(f"{where}: {odd[0]!r} is {'unknown' if odd[0] in value else 'missing'}")
    for name, hint in hints.items():
        if not _fits(value[name], hint):
            raise DataError(f"{where}: {name!r} cannot be {value[name]!r}")
    return kind(**value)


def _fits(value: Any, hint: Any) -> bool:
    kinds = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    allowed = {get_origin(kind) or kind for kind in kinds}
    if float in allowed:
        allowed.add(int)
    return not isinstance(value, bool) and isinstance(value, tuple(allowed))
