"""What `ChatCacheSlide` adds to its backend: everything between messages and token ids, and back.

In: a prompt length, a number of messages, repeats. Out: a table, or JSON, of CPU milliseconds, best
of all repeats: a whole call with a backend that answers at once; transformers' own chat template
and tokenizer for the same messages, which no client of a model gets round; LangChain alone, with a
model that does nothing. From call to call one message changes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from time import process_time
from typing import Any

from langchain_core.language_models.fake_chat_models import FakeListChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage

from cacheslide_agents.backend import GenerationChunk, GenerationRequest, Receipt, Scores
from cacheslide_agents.errors import BackendError
from cacheslide_agents.prompt.tokens import load_tokenizer
from langchain_cacheslide import ChatCacheSlide
from torch_cacheslide.locate import locate

ROOT = Path(__file__).resolve().parents[1]
ROLES = {"human": "user", "ai": "assistant"}


@dataclass(frozen=True)
class AnswersAtOnce:
    """A backend without a model: one word to every request."""

    tokenizer: Any
    model_id: str = "answers-at-once"
    max_model_len: int = 1 << 20

    def generate(self, request: GenerationRequest) -> Generator[GenerationChunk, None, None]:
        total = len(request.prompt_ids)
        receipt = Receipt(
            request_id=request.request_id,
            policy="none",
            outcome="cold",
            reason="",
            prompt_tokens=total,
            reused_tokens=0,
            active_tokens=total,
            compute_fraction=1.0,
            exact=True,
            ttft_s=0.0,
            chunks=(),
        )
        yield GenerationChunk(0, "Yes.", (0,), finish_reason="stop", receipt=receipt)

    def agenerate(self, request: GenerationRequest) -> Any:
        raise BackendError("this backend answers synchronous calls only")

    def score(self, request: GenerationRequest, continuation_ids: Sequence[int]) -> Scores:
        raise BackendError("this backend has no model")

    def warm(self, request: GenerationRequest) -> None: ...
    def pin(self, session: str, namespace: str = "default") -> None: ...
    def release(self, session: str, namespace: str = "default") -> None: ...
    def refresh(self, session: str, namespace: str = "default") -> None: ...

    def metrics(self) -> Mapping[str, float]:
        return {}

    def close(self) -> None: ...


@dataclass(frozen=True)
class Dialogue:
    """`count` messages that cut `text` into equal parts; the third changes from call to call."""

    text: str
    count: int

    def call(self, number: int) -> list[BaseMessage]:
        cuts = [len(self.text) * part // self.count for part in range(self.count + 1)]
        parts = [self.text[a:b] for a, b in pairwise(cuts)]
        parts[2] += f" Turn {number}: {number * 7919} notes were read."
        turns: list[BaseMessage] = [SystemMessage(parts[0])]
        for place, part in enumerate(parts[1:]):
            turns.append(AIMessage(part) if place % 2 else HumanMessage(part))
        return turns


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m", help="whose tokenizer")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--messages", type=int, default=22, help="an even number from 4")
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    tokenizer = load_tokenizer(locate(given.model))
    figures = measured(tokenizer, dialogue_of(tokenizer, given.tokens, given.messages), given)
    if given.json:
        print(json.dumps({**vars(given), **figures}, indent=1))
    else:
        print(*(f"{value:9.1f}  {name}" for name, value in figures.items()), sep="\n")


def dialogue_of(tokenizer: Any, tokens: int, messages: int) -> Dialogue:
    """Messages of about `tokens` tokens together, of documentation; there must be enough of it."""
    if messages < 4 or messages % 2:
        raise SystemExit(f"--messages {messages} must be an even number from 4")
    text = "\n".join(page.read_text("utf-8") for page in sorted(ROOT.glob("docs/**/*.md")))
    ends = [end for _, end in tokenizer(text, return_offsets_mapping=True)["offset_mapping"]]
    if tokens > len(ends):
        raise SystemExit(f"the documentation has {len(ends)} tokens only; lower --tokens {tokens}")
    return Dialogue(text[: ends[tokens - 1]], messages)


def measured(tokenizer: Any, dialogue: Dialogue, given: argparse.Namespace) -> dict[str, float]:
    """Tokens of the prompt, then CPU milliseconds by what was done."""
    ours = ChatCacheSlide(backend=AnswersAtOnce(tokenizer))
    idle = FakeListChatModel(responses=["Yes."])
    calls: dict[str, Callable[[list[BaseMessage]], Any]] = {
        "ms: a call of ChatCacheSlide, whole": ours.invoke,
        "ms: transformers' chat template and tokenizer": lambda turns: token_ids(tokenizer, turns),
        "ms: LangChain with a model that does nothing": idle.invoke,
    }
    best = {name: float("inf") for name in calls}
    for number in range(given.repeats):
        for name, call in calls.items():
            best[name] = min(best[name], milliseconds(call, dialogue.call(number)))
    return {"tokens": float(len(token_ids(tokenizer, dialogue.call(0)))), **best}


def token_ids(tokenizer: Any, turns: Sequence[BaseMessage]) -> list[int]:
    said = [{"role": ROLES.get(turn.type, turn.type), "content": turn.content} for turn in turns]
    ids = tokenizer.apply_chat_template(said, add_generation_prompt=True, return_dict=False)
    return list(ids)


def milliseconds(call: Callable[[list[BaseMessage]], Any], turns: list[BaseMessage]) -> float:
    """CPU time of this process."""
    begin = process_time()
    call(turns)
    return (process_time() - begin) * 1e3


if __name__ == "__main__":
    main()
