"""A backend's answer in LangChain's words.

In: `GenerationChunk`s. Out: `ChatGenerationChunk`s, the last of which carries usage and receipt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast
from uuid import uuid4

from langchain_core.messages import AIMessage, AIMessageChunk, message_chunk_to_message
from langchain_core.messages.ai import UsageMetadata
from langchain_core.messages.tool import ToolCallChunk
from langchain_core.messages.tool import tool_call_chunk as make_call_chunk
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult

from cacheslide_agents.backend import GenerationChunk
from cacheslide_agents.errors import BackendError
from cacheslide_agents.prompt.calls import CallFormat
from cacheslide_agents.sampling import TokenLogprob
from langchain_cacheslide.reasoning import ThoughtSplitter
from langchain_cacheslide.toolcalls import CallPiece, CallReader, joined
from langchain_cacheslide.usage import usage

PROVIDER = "cacheslide"


@dataclass(frozen=True, slots=True)
class AnswerSetup:
    """What must be known to read an answer.

    `spell`: the text of a token. `calls`: how calls are written, `None` where none is expected;
    `tools`: the names of those that may be called. `thinking`: the prompt ended inside the model's
    thoughts. `plan`: where the chunks came from.
    """

    model_name: str
    retained: bool
    spell: Callable[[int], str]
    calls: CallFormat | None = None
    tools: frozenset[str] = frozenset()
    thinking: bool = False
    plan: str = "automatic"


@dataclass(frozen=True, slots=True)
class Part:
    """What some chunks of one answer say; `last` is the chunk that ends it, where it is there."""

    text: str = ""
    thought: str = ""
    calls: Sequence[CallPiece] = ()
    logprobs: Sequence[TokenLogprob] = ()
    last: GenerationChunk | None = None

    @classmethod
    def of(cls, parts: Sequence[Part]) -> Part:
        """All of them as one: LangChain's own sum of messages takes far longer."""
        return cls(
            "".join(part.text for part in parts),
            "".join(part.thought for part in parts),
            joined([piece for part in parts for piece in part.calls]),
            [entry for part in parts for entry in part.logprobs],
            parts[-1].last,
        )


@dataclass
class Answer:
    """Turns the chunks of one answer into LangChain's, counting output tokens on the way."""

    setup: AnswerSetup
    output_tokens: int = 0
    reasoning_tokens: int = 0
    _thoughts: ThoughtSplitter = field(init=False)
    _calls: CallReader | None = field(init=False)

    def __post_init__(self) -> None:
        self._thoughts = ThoughtSplitter(self.setup.thinking)
        calls = self.setup.calls
        self._calls = None if calls is None else CallReader(calls, self.setup.tools)

    def add(self, chunk: GenerationChunk) -> ChatGenerationChunk | None:
        """`None` for a chunk that says nothing yet (half of a UTF-8 character)."""
        part = self.read(chunk)
        says = part.last or part.text or part.thought or part.calls or part.logprobs
        return self.told(part) if says else None

    def read(self, chunk: GenerationChunk) -> Part:
        """What the next chunk says beside those before it."""
        self.output_tokens += len(chunk.token_ids)
        pondered = self._thoughts.thinking
        thought, text = self._thoughts.feed(chunk.text)
        if pondered or thought or self._thoughts.thinking:
            self.reasoning_tokens += len(chunk.token_ids)
        last = chunk.finish_reason is not None
        if last:
            more_thought, more = self._thoughts.finish()
            thought, text = thought + more_thought, text + more
        text, pieces = self._without_calls(text, last)
        return Part(text, thought, pieces, chunk.logprobs or (), chunk if last else None)

    def told(self, part: Part) -> ChatGenerationChunk:
        """A part that was read, in LangChain's words."""
        message = AIMessageChunk(
            content=part.text,
            additional_kwargs={"reasoning_content": part.thought} if part.thought else {},
            tool_call_chunks=[_call_chunk(piece) for piece in part.calls],
            response_metadata=self._logprobs(part.logprobs),
        )
        if part.last is None:
            return ChatGenerationChunk(message=message)
        return self._finished(message, part.last)

    def _without_calls(self, text: str, last: bool) -> tuple[str, list[CallPiece]]:
        if self._calls is None:
            return text, []
        text, pieces = self._calls.feed(text)
        if last:
            more, rest = self._calls.finish()
            text, pieces = text + more, joined(pieces + rest)
        return text, pieces

    def _finished(self, message: AIMessageChunk, chunk: GenerationChunk) -> ChatGenerationChunk:
        reason = self._finish_reason(chunk)
        message.response_metadata |= {
            "finish_reason": reason,
            "model_name": self.setup.model_name,
            "model_provider": PROVIDER,
        }
        if (receipt := chunk.receipt) is not None:
            told = {**receipt.to_dict(), "plan": self.setup.plan}
            message.response_metadata["cacheslide"] = told
            new = receipt.prompt_tokens - receipt.reused_tokens
            message.usage_metadata = usage(
                receipt.prompt_tokens,
                self.output_tokens,
                reused=receipt.reused_tokens,
                stored=new if self.setup.retained else 0,
                thought=self.reasoning_tokens or None,
            )
        message.chunk_position = "last"
        return ChatGenerationChunk(message=message, generation_info={"finish_reason": reason})

    def _finish_reason(self, chunk: GenerationChunk) -> str | None:
        calls = self._calls
        called = calls is not None and calls.count > calls.broken
        return "tool_calls" if called and chunk.finish_reason == "stop" else chunk.finish_reason

    def _logprobs(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        """In OpenAI's shape."""
        if not logprobs:
            return {}
        content = [
            {
                **self._token(entry.token_id, entry.logprob),
                "top_logprobs": [self._token(*alternative) for alternative in entry.top],
            }
            for entry in logprobs
        ]
        return {"logprobs": {"content": content}}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self.setup.spell(token_id)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


class Answers:
    """All `n` answers of one request. Their prompt is counted once, in the usage of the first."""

    def __init__(self, setup: AnswerSetup, n: int) -> None:
        self._answers = [Answer(setup) for _ in range(n)]
        self._parts: list[list[Part]] = [[] for _ in range(n)]

    def add(self, chunk: GenerationChunk) -> None:
        self._parts[chunk.index].append(self._answers[chunk.index].read(chunk))

    def result(self) -> ChatResult:
        """Fewer than `n` where beams found no more that differ."""
        given = [pair for pair in zip(self._answers, self._parts, strict=True) if pair[1]]
        if not given:
            raise BackendError("the backend ended an answer without a word; look in its log")
        generations = [_whole(answer.told(Part.of(parts))) for answer, parts in given]
        for later in generations[1:]:
            message = cast(AIMessage, later.message)
            message.usage_metadata = _output_only(message.usage_metadata)
        return ChatResult(generations=generations)


def _whole(chunk: ChatGenerationChunk) -> ChatGeneration:
    message = message_chunk_to_message(chunk.message)
    return ChatGeneration(message=message, generation_info=chunk.generation_info)


def _output_only(counts: UsageMetadata | None) -> UsageMetadata | None:
    if counts is None:
        return None
    output = counts["output_tokens"]
    return UsageMetadata(input_tokens=0, output_tokens=output, total_tokens=output)


def _call_chunk(piece: CallPiece) -> ToolCallChunk:
    """Ids of nine letters and digits, for Mistral's chat template takes no others."""
    return make_call_chunk(
        name=piece.name,
        args=piece.arguments,
        id=uuid4().hex[:9] if piece.first else None,
        index=piece.index,
    )
