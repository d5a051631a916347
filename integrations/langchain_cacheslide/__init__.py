"""LangChain on top of cacheslide-agents: a chat model that says what it reused.

    chat = ChatCacheSlide(model="smollm2-135m")
    chain = TemplateRunnable.named("reflexion") | chat
    answer = chain.invoke(values)
    answer.response_metadata["cacheslide"]

Importing this package imports neither torch nor vllm; the model is loaded by the first call.
"""

from langchain_cacheslide.chat_model import ChatCacheSlide
from langchain_cacheslide.loader import BackendLoader
from langchain_cacheslide.messages import from_messages, to_messages, to_prompt_value
from langchain_cacheslide.template import TemplateRunnable

__all__ = [
    "BackendLoader",
    "ChatCacheSlide",
    "TemplateRunnable",
    "from_messages",
    "to_messages",
    "to_prompt_value",
]
