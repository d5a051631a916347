"""Stale values: does reuse answer with what memory used to say?

In: companion prompts in which a value changed ahead of reused history. Out: by policy the shares
that answer `new` and `old` and how many cases there were (`n`): which of the two values the
policy's next-token distribution prefers where the answers part. Besides, the same of the greedy
text (`greedy_new`, `greedy_old`), how often the preference is that of the dense run
(`same_as_dense`), and the shares by what the history says of the value.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from cacheslide_agents.backend import Backend, GenerationRequest
from cacheslide_agents.bench.measure import REFERENCE, Bench, Policies
from cacheslide_agents.bench.runner import Progress, longest_updates, silent
from cacheslide_agents.bench.studies.stale_cases import HISTORIES, Case, stale_cases
from cacheslide_agents.errors import DataError
from cacheslide_agents.policies import POLICY_NAMES, PromptCache, named
from cacheslide_agents.policies.base import Policy
from cacheslide_agents.prompt.chat import ChatEncoder

GREEDY_TOKENS = 16
Found = dict[str, Any]


def run(
    backend: Backend,
    data: Path,
    *,
    save: Callable[[Mapping[str, Any]], None],
    progress: Progress = silent,
    earlier: Mapping[str, Any] | None = None,
    policies: Sequence[str] = POLICY_NAMES,
    limit: int | None = None,
    seed: int = 0,
    max_prompt_tokens: int = 4096,
) -> dict[str, Any]:
    """Ask `limit` cases (default: all) under `policies` and always `recompute`.

    The cases come with the package: `data` and `seed` play no part. Cases of an `earlier` run of
    the same model and policies are kept.
    """
    bench = Bench(backend, ChatEncoder(backend.tokenizer).encode)
    cases = stale_cases()[:limit]
    chosen: dict[str, Policy] = {
        name: named(name) for name in dict.fromkeys((REFERENCE, *policies))
    }
    if "prompt_cache" in chosen:
        slots = longest_updates((case.turn for case in cases), bench.encode)
        chosen["prompt_cache"] = PromptCache(slots=slots)
    known = _known(earlier, backend, chosen)
    done: list[Found] = []
    for number, case in enumerate(cases):
        done.append(known.get(case.id) or _asked(bench, case, chosen, max_prompt_tokens))
        save(_study(backend, chosen, done))
        progress(number + 1, len(cases), case.id)
    return _study(backend, chosen, done)


def _known(
    earlier: Mapping[str, Any] | None, backend: Backend, policies: Policies
) -> dict[str, Found]:
    if earlier is None:
        return {}
    if earlier.get("model") != backend.model_id:
        raise DataError(
            f"cannot resume: the file's model is {earlier.get('model')!r}, not {backend.model_id!r}"
        )
    try:
        return {
            case["id"]: case
            for case in earlier.get("cases", ())
            if case["policies"].keys() == set(policies)
        }
    except (AttributeError, KeyError, TypeError) as error:
        raise DataError(f"cannot resume: the file's cases are malformed ({error!r})") from error


def _asked(bench: Bench, case: Case, policies: Policies, max_prompt_tokens: int) -> Found:
    """What every policy answers: `margin`, the log-odds of the new value against the old, and
    the greedy `text`.
    """
    populated = bench.populate(case.turn, policies)
    tokens = len(populated.prompt.ids)
    if tokens > max_prompt_tokens:
        raise DataError(f"a case has {tokens} tokens; raise --max-prompt-tokens")
    shared, old, new = _parting(bench.backend.tokenizer, case.answers)
    found = {}
    for label, policy in policies.items():
        request = GenerationRequest.of(
            populated.prompt, namespace=populated.within(policy), policy=policy, retain=False
        )
        logprobs = bench.backend.score(request, [*shared, new]).logprobs[-1]
        text = bench.time(populated, policy, max_tokens=GREEDY_TOKENS).text
        found[label] = {"margin": float(logprobs[new] - logprobs[old]), "text": text}
    return {
        "id": case.id,
        "history": case.history,
        "old": case.old,
        "new": case.new,
        "prompt_tokens": tokens,
        "policies": found,
    }


def _parting(tokenizer: Any, answers: tuple[str, str]) -> tuple[list[int], int, int]:
    """The tokens that both answers begin with, and the first one at which they part."""
    old, new = (tokenizer(each, add_special_tokens=False)["input_ids"] for each in answers)
    shared = next(i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b)
    return list(new[:shared]), old[shared], new[shared]


def _study(backend: Backend, policies: Policies, cases: Sequence[Found]) -> dict[str, Any]:
    return {
        "model": backend.model_id,
        **{name: _shares(name, cases) for name in policies},
        "cases": list(cases),
    }


def _shares(policy: str, cases: Sequence[Found]) -> dict[str, Any]:
    kinds = {kind: [case for case in cases if case["history"] == kind] for kind in HISTORIES}
    said = [_value_said(case, policy) for case in cases]
    agreed = [_prefers_new(case, policy) == _prefers_new(case, REFERENCE) for case in cases]
    return {
        **_preferred(policy, cases),
        "greedy_new": said.count("new") / len(cases),
        "greedy_old": said.count("old") / len(cases),
        "same_as_dense": fmean(agreed),
        "by_history": {kind: _preferred(policy, some) for kind, some in kinds.items() if some},
    }


def _preferred(policy: str, cases: Sequence[Found]) -> dict[str, Any]:
    new = fmean(_prefers_new(case, policy) for case in cases)
    return {"new": new, "old": 1.0 - new, "n": len(cases)}


def _prefers_new(case: Found, policy: str) -> bool:
    margin: float = case["policies"][policy]["margin"]
    return margin > 0.0


def _value_said(case: Found, policy: str) -> str:
    """`old` or `new`, whichever value alone stands in the greedy text; else nothing."""
    text = case["policies"][policy]["text"]
    said = [
        which
        for which in ("old", "new")
        if re.search(rf"\b{re.escape(case[which])}\b", text, re.IGNORECASE)
    ]
    return said[0] if len(said) == 1 else ""
