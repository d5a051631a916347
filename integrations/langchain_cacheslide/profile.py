"""What LangChain asks of a model before it uses it.

In: a backend or its name. Out: the model's profile, by which agents choose how to get structured
answers and when to shorten a conversation.
"""

from __future__ import annotations

from typing import Any

from langchain_core.language_models import ModelProfile

from cacheslide_agents.backend import Backend


def profile_of(backend: Any) -> ModelProfile:
    """The window is known only of a backend that is loaded."""
    profile = ModelProfile(
        text_inputs=True,
        text_outputs=True,
        image_inputs=False,
        audio_inputs=False,
        video_inputs=False,
        pdf_inputs=False,
        tool_calling=True,
        tool_choice=True,
        tool_call_streaming=True,
        structured_output=True,
    )
    if isinstance(backend, Backend):
        profile["max_input_tokens"] = backend.max_model_len
    return profile
