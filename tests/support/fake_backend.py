"""A backend that answers without a model and remembers what it was asked.

In: `GenerationRequest`s. Out: the last user message word by word, or what it was told to say, and a
made-up receipt. The tokenizer is a real one: bytes with the ChatML control tokens.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from cacheslide_agents.backend import (
    ChunkOutcome,
    FinishReason,
    GenerationChunk,
    GenerationRequest,
    Receipt,
    Scores,
    TokenLogprob,
)

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer() -> Any:
    """One token a byte, plus `<|im_start|>` and `<|im_end|>`; ChatML as chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    control = [AddedToken(text, special=True) for text in ("<|im_start|>", "<|im_end|>")]
    tokenizer.add_special_tokens(control)
    wrap: Any = PreTrainedTokenizerFast
    return wrap(tokenizer_object=tokenizer, eos_token="<|im_end|>", chat_template=CHATML)


@dataclass
class FakeBackend:
    """`reused` tokens of every prompt count as hits. `pause_s` passes before every piece.

    `says`: the answers to give, one a request, the last one from then on, in pieces of `piece`
    characters and for the reason `ends`.
    """

    tokenizer: Any = field(default_factory=byte_tokenizer)
    model_id: str = "fake-model"
    max_model_len: int = 4096
    reused: int = 0
    pause_s: float = 0.0
    says: Sequence[str] = ()
    piece: int = 3
    ends: FinishReason = "stop"
    requests: list[GenerationRequest] = field(default_factory=list)
    finished: int = 0
    stopped: int = 0
    closed: bool = False
    loaded_with: tuple[str, dict[str, Any]] | None = None

    def generate(self, request: GenerationRequest) -> Generator[GenerationChunk, None, None]:
        self.requests.append(request)
        whole = False
        try:
            for piece in self._pieces(request):
                time.sleep(self.pause_s)
                yield piece
            whole = True
        finally:
            self._count(whole)

    async def agenerate(self, request: GenerationRequest) -> AsyncGenerator[GenerationChunk, None]:
        self.requests.append(request)
        whole = False
        try:
            for piece in self._pieces(request):
                await asyncio.sleep(self.pause_s)
                yield piece
            whole = True
        finally:
            self._count(whole)

    def score(self, request: GenerationRequest, continuation_ids: Sequence[int]) -> Scores:
        """The same uniform distribution before every token."""
        self.requests.append(request)
        size = len(self.tokenizer)
        uniform = np.full((len(continuation_ids), size), -np.log(size), dtype=np.float32)
        return Scores(uniform, self._receipt(request))

    def warm(self, request: GenerationRequest) -> None: ...
    def pin(self, session: str, namespace: str = "default") -> None: ...
    def release(self, session: str, namespace: str = "default") -> None: ...
    def refresh(self, session: str, namespace: str = "default") -> None: ...

    def metrics(self) -> Mapping[str, float]:
        return {"requests": float(len(self.requests))}

    def close(self) -> None:
        self.closed = True

    def prompt(self, request: GenerationRequest) -> str:
        return str(self.tokenizer.decode(list(request.prompt_ids), skip_special_tokens=False))

    def _pieces(self, request: GenerationRequest) -> Iterator[GenerationChunk]:
        wanted = request.sampling.logprobs
        for index in range(request.sampling.n):
            for text in self._texts(request, index):
                ids = tuple(self.tokenizer.encode(text))
                top = tuple((number, -1.0) for number in range(wanted or 0))
                told = tuple(TokenLogprob(number, -0.5, top) for number in ids)
                yield GenerationChunk(index, text, ids, None if wanted is None else told)
            receipt = self._receipt(request)
            yield GenerationChunk(index, "", (), finish_reason=self.ends, receipt=receipt)

    def _texts(self, request: GenerationRequest, index: int) -> list[str]:
        if self.says:
            told = self.says[min(len(self.requests) - 1 + index, len(self.says) - 1)]
            return [told[i : i + self.piece] for i in range(0, len(told), self.piece)]
        question = self.prompt(request).rpartition("<|im_start|>user\n")[2].split("<|im_end|>")[0]
        words = question.split()[: request.sampling.max_tokens]
        return [word if place == 0 else f" {word}" for place, word in enumerate(words)]

    def _count(self, whole: bool) -> None:
        self.finished += whole
        self.stopped += not whole

    def _receipt(self, request: GenerationRequest) -> Receipt:
        total = len(request.prompt_ids)
        dense = request.policy is not None and request.policy.name == "recompute"
        reused = 0 if dense else self.reused
        return Receipt(
            request_id=request.request_id,
            policy="fake" if request.policy is None else request.policy.name,
            outcome="partial" if reused else "cold",
            reason="",
            prompt_tokens=total,
            reused_tokens=reused,
            active_tokens=total - reused,
            compute_fraction=(total - reused) / total,
            exact=not reused,
            ttft_s=0.25,
            chunks=tuple(
                ChunkOutcome(span.id, span.role, len(span), "update", None, 0, 0, "cold")
                for span in request.spans
            ),
        )
