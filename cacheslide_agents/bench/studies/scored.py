"""Scores of answers that were given in two ways, pair by pair.

In: two answers to each question, and what is accepted. Out: F1 and exact match of both, their
means, and the mean paired difference with its bootstrap 95 % interval. Rows of an earlier run are
kept if it was about the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from cacheslide_agents.bench.bootstrap import mean_interval
from cacheslide_agents.bench.metrics import exact_match, token_f1
from cacheslide_agents.errors import DataError

METRICS: Mapping[str, Callable[[str, Sequence[str]], float]] = {"f1": token_f1, "em": exact_match}
Row = dict[str, Any]
Ways = tuple[str, str]
"""What the two ways are called in a file; the difference is the second's less the first's."""


def scored(answers: Mapping[str, str], accepted: Sequence[str]) -> Row:
    """`f1_WAY` and `em_WAY` of each answer, and whether the two texts differ."""
    return {
        **{
            f"{name}_{way}": metric(answer, accepted)
            for name, metric in METRICS.items()
            for way, answer in answers.items()
        },
        "changed": len(set(answers.values())) > 1,
    }


def paired(rows: Sequence[Mapping[str, Any]], ways: Ways) -> dict[str, float]:
    """Of all metrics: means of both ways and of the differences, with their interval."""
    found: dict[str, float] = {}
    for metric in METRICS:
        first, second = ([row[f"{metric}_{way}"] for row in rows] for way in ways)
        differences = [new - old for old, new in zip(first, second, strict=True)]
        low, high = mean_interval(differences)
        found |= {
            f"{metric}_{ways[0]}": fmean(first),
            f"{metric}_{ways[1]}": fmean(second),
            f"{metric}_difference": fmean(differences),
            f"{metric}_low": low,
            f"{metric}_high": high,
        }
    return {**found, "changed": fmean(row["changed"] for row in rows)}


def known_rows(
    earlier: Mapping[str, Any] | None,
    about: Mapping[str, Any],
    summarise: Callable[[list[Row]], object],
) -> dict[tuple[str, str], Row]:
    """The rows of an `earlier` file by task and id.

    `DataError` unless it is `about` the same and `summarise` can read all of them.
    """
    if earlier is None:
        return {}
    for name, value in about.items():
        if earlier.get(name) != value:
            raise DataError(
                f"cannot resume: the file's {name} is {earlier.get(name)!r}, not {value!r}"
            )
    try:
        rows = {(row["task"], row["id"]): row for row in earlier.get("rows", ())}
        if rows:
            summarise(list(rows.values()))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"cannot resume: the file's rows are malformed ({error!r})") from error
    return rows
