"""The model of any server that speaks OpenAI's chat completions: vLLM, SGLang, llama.cpp, ...

In: a server's address; questions. Out: the calls that ask them. Chunk plans go only to a server
whose `/cacheslide/status` asks for them; every other server sees plain requests, and the receipt
says that reuse is off.

The HTTP client honours the environment's proxies (`HTTP_PROXY`, `HTTPS_PROXY`, `ALL_PROXY`), so
list a local server in `NO_PROXY`, and `OPENAI_CUSTOM_HEADERS`; OpenAI's own keys, organisation and
project are never sent.
"""

from __future__ import annotations

from pydantic import SecretStr

from langchain_cacheslide.question import Question
from langchain_cacheslide.remote_call import RemoteCall
from langchain_cacheslide.remote_exchange import Cut, cut_by_characters
from langchain_cacheslide.remote_question import Patience
from langchain_cacheslide.remote_server import Server


class RemoteChat:
    """A server's model behind LangChain's words. Safe to call from threads and event loops.

    `model=None` takes the only model the server has. `cut` finds the chunks for a plan; one that
    encodes with the server's own tokenizer binds plans to token ids.

    Settings: `temperature`, `max_tokens`, `top_p`, `top_k`, `min_p`, `repetition_penalty`, `seed`,
    `stop`, `logprobs`, `top_logprobs`, `n` (1 for a stream), `parallel_tool_calls`, `strict`,
    `namespace`, `task`, `session`, `reuse`, `policy`. One that is absent or `None` is left to the
    server, and so are `top_k`, `min_p` and `repetition_penalty` at their off values. Beside them
    `timeout`: seconds for the whole answer, retries included (`None`: as many as it takes, unless a
    server is silent for ten minutes); the server's models, asked for once, have as many (60 for
    `None`), its status and a receipt 5 at most. And `max_retries` (2): refused and broken
    connections, 408, 409, 429 and 5xx are tried again as often, not once an answer has begun.
    `tools`, `tool_choice` and `response_format` are in OpenAI's form. Every failure is a
    `CacheSlideError`, mostly a `ServerError`, whose `partial` keeps the text of an answer that
    broke off.
    """

    def __init__(
        self,
        base_url: str,
        api_key: SecretStr | None = None,
        model: str | None = None,
        *,
        cut: Cut = cut_by_characters,
    ) -> None:
        self._server = Server(base_url, api_key, model)
        self._cut = cut

    def __repr__(self) -> str:
        return f"RemoteChat({self._server.url!r})"

    @property
    def model(self) -> str:
        """The model's name; asks the server if none was given."""
        return self._server.facts(Patience()).model

    def call(self, question: Question) -> RemoteCall:
        """What asks the question."""
        return RemoteCall(self._server, self._cut, question)
