"""Token counts in LangChain's words.

In: counts, as far as they are known. Out: `UsageMetadata`.
"""

from __future__ import annotations

from langchain_core.messages.ai import InputTokenDetails, OutputTokenDetails, UsageMetadata


def usage(
    prompt: int,
    output: int,
    *,
    reused: int | None = None,
    stored: int | None = None,
    thought: int | None = None,
) -> UsageMetadata:
    """`reused` and not recomputed (`cache_read`), newly `stored` (`cache_creation`), `thought`
    (`reasoning`); `None` for what nobody counted."""
    details = InputTokenDetails()
    if reused is not None:
        details["cache_read"] = reused
    if stored is not None:
        details["cache_creation"] = stored
    counts = UsageMetadata(
        input_tokens=prompt,
        output_tokens=output,
        total_tokens=prompt + output,
        input_token_details=details,
    )
    if thought is not None:
        counts["output_token_details"] = OutputTokenDetails(reasoning=thought)
    return counts
