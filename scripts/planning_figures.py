"""What comes before computing: tokenising, aligning and planning a later turn. No model is run.

In: prompt lengths, repeats. Out: a table, or JSON, of CPU milliseconds, best of all repeats. From
turn to turn one line changes that stands at 1/8 of the prompt, before the other 7/8; the text is
this project's documentation. The first tokenisation, of text never seen before, stands apart.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from time import process_time
from typing import Any, NoReturn, TypeVar

import numpy as np
from transformers import AutoConfig

from cacheslide_agents.chunks import Chunk, ChunkedPrompt, EncodedPrompt, Message, Role
from cacheslide_agents.pages.base import ContextKey, StoredContext
from cacheslide_agents.policies import CacheSlide, Plan
from cacheslide_agents.policies.cost import CostModel
from cacheslide_agents.policies.planner import make_plan
from cacheslide_agents.prompt.chat import ChatEncoder
from cacheslide_agents.prompt.tokens import load_tokenizer
from torch_cacheslide.locate import locate

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[1]
KEY = ContextKey("model", "default", "planning")
CHUNKS = 16
"""Chunks of unchanged text in a prompt."""


@dataclass(frozen=True)
class Figures:
    """One length. CPU milliseconds; `reused` is the share of tokens in runs of the plan."""

    tokens: int
    first_tokenising_ms: float
    tokenising_ms: float
    planning_ms: float
    together_ms: float
    reused: float
    outcome: str


@dataclass(frozen=True)
class OneContext:
    """A store that holds the turn before, of which planning looks at the tokens alone."""

    context: StoredContext

    def find(self, key: ContextKey, session: str | None = None) -> list[StoredContext]:
        return [self.context]

    def find_isolated(self, key: ContextKey, ids: Any) -> None:
        return None

    def load(self, context: StoredContext, layer: int, ranges: Any = None) -> NoReturn:
        raise NotImplementedError("the default policy plans without keys and values")


@dataclass(frozen=True)
class Turns:
    """The turns of one session; `text` is what never changes."""

    text: str

    def turn(self, number: int) -> ChunkedPrompt:
        cuts = [len(self.text) * part // CHUNKS for part in range(CHUNKS + 1)]
        parts = [self.text[a:b] for a, b in pairwise(cuts)]
        chunks = [Chunk(f"text-{i}", part, Role.REUSE) for i, part in enumerate(parts)]
        changed = f"\nTurn {number}: {number * 7919} notes were read and {number} of them kept.\n"
        chunks.insert(CHUNKS // 8, Chunk("memory", changed))
        return ChunkedPrompt((Message("user", tuple(chunks)),), KEY.task)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m", help="whose tokenizer and sizes")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2000, 16000])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    folder = locate(given.model)
    tokenizer = load_tokenizer(folder)
    cost = CostModel.from_config(AutoConfig.from_pretrained(folder))
    found = [
        measured(tokenizer, cost, turns_of(tokenizer, tokens), given.repeats)
        for tokens in given.tokens
    ]
    if given.json:
        print(json.dumps({**vars(given), "figures": [asdict(each) for each in found]}, indent=1))
    else:
        print(*table(found), sep="\n")


def turns_of(tokenizer: Any, tokens: int) -> Turns:
    """Turns of about `tokens` tokens of documentation, of which there must be enough."""
    pages = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    ends = [end for _, end in tokenizer(text, return_offsets_mapping=True)["offset_mapping"]]
    if tokens > len(ends):
        raise SystemExit(f"the documentation has {len(ends)} tokens only; lower --tokens {tokens}")
    return Turns(text[: ends[tokens - 1]])


def measured(tokenizer: Any, cost: CostModel, turns: Turns, repeats: int) -> Figures:
    first = []
    for _ in range(repeats):
        encoder = new_encoder(tokenizer)
        milliseconds, before = timed(partial(encoder.encode, turns.turn(0)))
        first.append(milliseconds)
    later = [later_turn(encoder, cost, before, turns.turn(n + 1)) for n in range(repeats)]
    tokenising, planning, prompts, plans = zip(*later, strict=True)
    return Figures(
        tokens=len(prompts[0].ids),
        first_tokenising_ms=min(first),
        tokenising_ms=min(tokenising),
        planning_ms=min(planning),
        together_ms=min(a + b for a, b in zip(tokenising, planning, strict=True)),
        reused=sum(planned.run.length for planned in plans[0].runs) / len(prompts[0].ids),
        outcome=plans[0].outcome,
    )


def new_encoder(tokenizer: Any) -> ChatEncoder:
    """One that has seen no text but knows the tokenizer's control tokens."""
    encoder = ChatEncoder(tokenizer)
    encoder.encode(ChunkedPrompt((Message("user", (Chunk("hello", "Hello."),)),), KEY.task))
    return encoder


def later_turn(
    encoder: ChatEncoder, cost: CostModel, before: EncodedPrompt, turn: ChunkedPrompt
) -> tuple[float, float, EncodedPrompt, Plan]:
    """Milliseconds of tokenising and of planning, and what they gave."""
    old = np.array(before.ids)
    store = OneContext(StoredContext(KEY, old, np.ones(len(old), bool), before.spans))
    tokenising, prompt = timed(lambda: encoder.encode(turn))
    planning, plan = timed(
        lambda: make_plan(np.array(prompt.ids), prompt.spans, KEY, None, CacheSlide(), store, cost)
    )
    return tokenising, planning, prompt, plan


def timed(work: Callable[[], T]) -> tuple[float, T]:
    """CPU milliseconds of this process, and the result."""
    begin = process_time()
    result = work()
    return (process_time() - begin) * 1e3, result


def table(found: Sequence[Figures]) -> Iterator[str]:
    yield "tokens  first tokenising  tokenising  aligning, planning  together  reused  outcome"
    for each in found:
        yield (
            f"{each.tokens:6}  {each.first_tokenising_ms:13.1f} ms  {each.tokenising_ms:7.1f} ms"
            f"  {each.planning_ms:15.1f} ms  {each.together_ms:5.1f} ms  {each.reused:6.1%}"
            f"  {each.outcome}"
        )


if __name__ == "__main__":
    main()
