"""Window padding against free length: is it better to pad an update than to move what follows?

In: changed turns of a workload. Out: `curves`, mean KL to the dense run of the prompt as it is,
against how many filler tokens stand in the update's window besides its longest text.

| curve | prompt | what follows the update |
| --- | --- | --- |
| `free length, reused` | as it is | moved, nothing corrected; one figure, whatever the window |
| `padded, reused` | update filled up to a fixed window in both turns | unmoved; not corrected |
| `padded, dense` | the same | computed: what the filler itself does to the answer |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any
from uuid import uuid4

from cacheslide_agents.answered import answered
from cacheslide_agents.backend import Backend, GenerationRequest, Sampling, Scores
from cacheslide_agents.bench.metrics import kl_divergence
from cacheslide_agents.bench.runner import Progress, silent
from cacheslide_agents.bench.studies.curves import Figure, draw
from cacheslide_agents.bench.task_data import TaskData
from cacheslide_agents.chunks import EncodedPrompt, Role, Span
from cacheslide_agents.errors import DataError
from cacheslide_agents.policies import CacheSlide, Policy, Recompute

FILLERS = (0, 128, 512)
KL_TOKENS = 8
AS_IT_STANDS = CacheSlide(selector=None, may_decline=False)


def run(
    backend: Backend,
    data: Path,
    *,
    save: Callable[[Mapping[str, Any]], None],
    progress: Progress = silent,
    task: str = "reflexion",
    cope_model: str | None = None,
    fillers: Sequence[int] = FILLERS,
    limit: int = 2,
    seed: int = 0,
    max_prompt_tokens: int = 4096,
) -> dict[str, Any]:
    """`limit` turns of `task`; with `cope_model` also on the converted model."""
    started = perf_counter()
    room = min(max_prompt_tokens, backend.max_model_len) - max(fillers)
    if room < 1:
        raise DataError(
            f"{max(fillers)} filler tokens leave no room for a prompt; raise --max-prompt-tokens, "
            "or choose a model with a longer window"
        )
    source = TaskData.of(backend, data, limit=limit, seed=seed, max_prompt_tokens=room)
    return draw(
        backend,
        cope_model,
        source.pairs([task]),
        partial(_turn, fillers),
        started=started,
        x="filler tokens in the window besides the longest update",
        y="mean KL to dense",
        save=save,
        progress=progress,
    )


def _turn(
    fillers: Sequence[int], backend: Backend, old: EncodedPrompt, new: EncodedPrompt
) -> Iterable[Figure]:
    """(curve, filler, KL) of one turn."""
    forced = _greedy(backend, new)
    dense = _scores(backend, new, Recompute(), forced)

    def distance(found: Scores) -> float:
        return kl_divergence(dense.logprobs, found.logprobs)

    free = distance(_reused(backend, old, new, forced))
    update, longest = changed_update(old, new)
    for filler in fillers:
        window = longest + filler
        before, now = (padded(each, update, window, _filler(backend)) for each in (old, new))
        yield "free length, reused", filler, free
        yield "padded, reused", filler, distance(_reused(backend, before, now, forced))
        yield "padded, dense", filler, distance(_scores(backend, now, Recompute(), forced))


def changed_update(old: EncodedPrompt, new: EncodedPrompt) -> tuple[str, int]:
    """The first recompute chunk whose text changed, and the tokens of its longer text."""
    before = {span.id: span for span in old.spans}
    for span in new.spans:
        earlier = before.get(span.id)
        if span.role is Role.RECOMPUTE and earlier and earlier.digest != span.digest:
            return span.id, max(len(span), len(earlier))
    raise DataError("no chunk of role recompute changed in this turn; choose another task")


def padded(prompt: EncodedPrompt, update: str, window: int, filler: int) -> EncodedPrompt:
    """`prompt` with its chunk `update` filled up to `window` tokens."""
    ids, spans = list(prompt.ids), []
    added = 0
    for span in prompt.spans:
        moved = replace(span, start=span.start + added, stop=span.stop + added)
        if span.id == update:
            extra = window - len(span)
            ids[moved.stop : moved.stop] = [filler] * extra
            digest = f"{span.digest}+{extra}"
            moved = Span(span.id, span.role, moved.start, moved.stop + extra, digest)
            added = extra
        spans.append(moved)
    return replace(prompt, ids=tuple(ids), spans=tuple(spans), ends=())


def _filler(backend: Backend) -> int:
    ids: list[int] = backend.tokenizer("\n", add_special_tokens=False)["input_ids"]
    return ids[-1]


def _greedy(backend: Backend, prompt: EncodedPrompt) -> tuple[int, ...]:
    """The first tokens of the dense answer."""
    request = _request(prompt, Recompute(), f"padding-{uuid4().hex}")
    return answered(backend, request).token_ids


def _scores(
    backend: Backend, prompt: EncodedPrompt, policy: Policy, forced: Sequence[int]
) -> Scores:
    return backend.score(_request(prompt, policy, f"padding-{uuid4().hex}"), forced)


def _reused(
    backend: Backend, old: EncodedPrompt, new: EncodedPrompt, forced: Sequence[int]
) -> Scores:
    namespace = f"padding-{uuid4().hex}"
    backend.warm(_request(old, AS_IT_STANDS, namespace))
    return backend.score(_request(new, AS_IT_STANDS, namespace), forced)


def _request(prompt: EncodedPrompt, policy: Policy, namespace: str) -> GenerationRequest:
    return GenerationRequest.of(
        prompt,
        namespace=namespace,
        sampling=Sampling(max_tokens=KL_TOKENS, ignore_eos=True),
        policy=policy,
        retain=False,
    )
