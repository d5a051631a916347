"""A backend's answer in LangChain's words.

In: `GenerationChunk`s. Out: `ChatGenerationChunk`s, the last of which carries usage and receipt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from langchain_core.messages import AIMessageChunk
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.outputs import ChatGenerationChunk

from cacheslide_agents.backend import GenerationChunk, Receipt


def usage(receipt: Receipt, output_tokens: int, *, retained: bool) -> UsageMetadata:
    """Token counts. `cache_read`: reused and not recomputed; `cache_creation`: newly stored."""
    details = InputTokenDetails(
        cache_read=receipt.reused_tokens,
        cache_creation=receipt.prompt_tokens - receipt.reused_tokens if retained else 0,
    )
    return UsageMetadata(
        input_tokens=receipt.prompt_tokens,
        output_tokens=output_tokens,
        total_tokens=receipt.prompt_tokens + output_tokens,
        input_token_details=details,
    )


@dataclass
class Answer:
    """Turns the chunks of one request into LangChain's, counting output tokens on the way."""

    model_name: str
    retained: bool
    output_tokens: int = 0

    def add(self, chunk: GenerationChunk) -> ChatGenerationChunk | None:
        """`None` for a chunk that has neither text nor an end (half of a UTF-8 character)."""
        self.output_tokens += len(chunk.token_ids)
        if chunk.finish_reason is not None:
            return self._last(chunk)
        if not chunk.text:
            return None
        return ChatGenerationChunk(message=AIMessageChunk(content=chunk.text))

    def _last(self, chunk: GenerationChunk) -> ChatGenerationChunk:
        metadata: dict[str, Any] = {
            "finish_reason": chunk.finish_reason,
            "model_name": self.model_name,
        }
        counts = None
        if chunk.receipt is not None:
            metadata["cacheslide"] = chunk.receipt.to_dict()
            counts = usage(chunk.receipt, self.output_tokens, retained=self.retained)
        message = AIMessageChunk(
            content=chunk.text,
            response_metadata=metadata,
            usage_metadata=counts,
            chunk_position="last",
        )
        return ChatGenerationChunk(
            message=message, generation_info={"finish_reason": chunk.finish_reason}
        )
