"""LangChain's standard unit tests for chat models."""

from __future__ import annotations

from typing import Any

from langchain_tests.unit_tests import ChatModelUnitTests

from langchain_cacheslide import ChatCacheSlide


class TestChatCacheSlideUnit(ChatModelUnitTests):
    @property
    def chat_model_class(self) -> type[ChatCacheSlide]:
        return ChatCacheSlide

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "smollm2-135m"}

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_anthropic_inputs(self) -> bool:
        return True

    @property
    def init_from_env_params(self) -> tuple[dict[str, str], dict[str, Any], dict[str, Any]]:
        variables = {
            "CACHESLIDE_MODEL": "served",
            "CACHESLIDE_BASE_URL": "http://localhost:8000/v1",
            "CACHESLIDE_API_KEY": "secret",
        }
        expected = {
            "model": "served",
            "base_url": "http://localhost:8000/v1",
            "api_key": "secret",
        }
        return variables, {}, expected
