"""From a chunked conversation to token ids, through the model's own chat template.

In: a `ChunkedPrompt`, tool schemas. Out: an `EncodedPrompt`, whose spans partition its ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from cacheslide_agents.chunks import ChunkedPrompt, EncodedPrompt, Message, Span, not_unicode
from cacheslide_agents.errors import PromptError
from cacheslide_agents.prompt.calls import HERMES, CallFormat, recognised
from cacheslide_agents.prompt.collect import MESSAGE_ROLES
from cacheslide_agents.prompt.control import ControlTokens
from cacheslide_agents.prompt.fold import folded_system
from cacheslide_agents.prompt.ids import UniqueIds
from cacheslide_agents.prompt.pieces import Tokens
from cacheslide_agents.prompt.seams import Rendering, render_chunks
from cacheslide_agents.prompt.tokens import MarkupTokenizer, fast_backend
from cacheslide_agents.prompt.tools import Tool, checked_tools, written_out

PLAIN_CHAT_TEMPLATE = (
    "{{ begin }}{% for message in messages %}{{ message.role | capitalize }}: "
    "{{ message.content }}\n\n{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)
"""For tokenizers without a chat template (base models): `Role: text`, a blank line between.

Such a prompt has no control tokens, so a value can imitate a turn in it; use it with care.
"""

_ROLE_PROBES = (
    ("user", "assistant", "user"),
    ("system", "user", "assistant", "user"),
    ("user", "assistant", "tool"),
)
"""Conversations that show which tokens mark roles; a template may refuse some of them."""

_PROBE_TOOL: Tool = {
    "type": "function",
    "function": {
        "name": "probetool",
        "description": "Probe.",
        "parameters": {"type": "object", "properties": {"a": {"type": "string"}}},
    },
}
_PROBE_CALL = {
    "id": "probe1234",
    "type": "function",
    "function": {"name": "probetool", "arguments": {"a": "probeargument"}},
}


class ChatEncoder:
    """Renders and tokenises prompts for one model. Immutable; safe to call from several threads.

    `tokenizer`: a fast `transformers` tokenizer. `chat_template` replaces its own. `variables` are
    passed to the template on every call (`enable_thinking`, a date, ...).

    The ids equal `tokenizer.apply_chat_template(...)`, unless a value holds control-token text:
    that stays text, so no value can end a message or begin one.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        chat_template: str | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._backend = fast_backend(tokenizer)
        self._variables = dict(variables or {})
        self._template = chat_template
        if chat_template is None and not tokenizer.chat_template:
            self._template = PLAIN_CHAT_TEMPLATE
            self._variables = {"begin": self._beginning(), **self._variables}

    def encode(
        self,
        prompt: ChunkedPrompt,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> EncodedPrompt:
        """Spans in the order in which the chunks came out of the template.

        What the template writes before a chunk belongs to that chunk, what it writes after the
        last one to a span `generation-prompt`; a token across a border belongs to the later chunk.
        Native tool schemas are a span `tools`. Where the template hides the borders within
        messages, a span is a message (`first..last`) or, at worst, the whole `prompt`.

        Raises `PromptError` for an unknown role, an empty prompt or text that is not Unicode, and
        when the chat template refuses the conversation; `TokenizerError` if the tokenizer cannot
        be kept from making control tokens of values.
        """
        _check(prompt)
        messages, schemas = list(prompt.messages), checked_tools(tools)
        if not self.knows_tools:
            messages, schemas = written_out(messages, schemas), []
        if not self._knows_system:
            messages = folded_system(messages)

        def render(dialogue: list[dict[str, Any]], tools: list[Tool]) -> str:
            return self._render(dialogue, tools, add_generation_prompt)

        rendering = render_chunks(messages, schemas, render, self._markup_tokenizer.controls)
        _check_unicode(rendering.text, "the rendered prompt (tools, calls or names)")
        tokens = self._markup_tokenizer.encode(rendering.text, rendering.markup)
        spans = _spans(rendering, tokens)
        ids, ends = tuple(tokens.ids.tolist()), tuple(tokens.ends.tolist())
        return EncodedPrompt(ids, spans, rendering.text, prompt.task, ends)

    @cached_property
    def knows_tools(self) -> bool:
        """Whether the chat template shows tool schemas, calls and results, in a known format."""
        return self._native_calls is not None

    @cached_property
    def call_format(self) -> CallFormat:
        """How the model is shown calls, and so writes them: natively, or in our own text."""
        return self._native_calls or HERMES

    @cached_property
    def _native_calls(self) -> CallFormat | None:
        dialogue: list[dict[str, Any]] = [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "", "tool_calls": [_PROBE_CALL]},
            {
                "role": "tool",
                "content": "proberesult",
                "tool_call_id": "probe1234",
                "name": "probetool",
            },
        ]
        try:
            listed = self._render(dialogue[:1], [_PROBE_TOOL], True)
            used = self._render(dialogue, [_PROBE_TOOL], True)
            called = self._render(dialogue[:2], [], False)
        except PromptError:
            return None
        known = "probetool" in listed and "probeargument" in used and "proberesult" in used
        tokens = self._backend.get_added_tokens_decoder().items()
        special = {token.content: number for number, token in tokens if token.special}
        return recognised(called, special) if known else None

    @cached_property
    def _knows_system(self) -> bool:
        return "Hi system" in self._rendered_roles(("system", "user"))

    @cached_property
    def _markup_tokenizer(self) -> MarkupTokenizer:
        roles = "".join(map(self._rendered_roles, _ROLE_PROBES))
        source = self._template or self._tokenizer.get_chat_template(tools=[_PROBE_TOOL])
        unknown = getattr(self._backend.model, "unk_token", None) or self._tokenizer.unk_token
        controls = ControlTokens.of(self._backend, source, roles, unknown)
        return MarkupTokenizer(self._backend, controls)

    def _rendered_roles(self, turns: Sequence[str]) -> str:
        try:
            dialogue = [{"role": role, "content": f"Hi {role}"} for role in turns]
            return self._render(dialogue, [], False)
        except PromptError:
            return ""

    def _render(
        self, dialogue: list[dict[str, Any]], tools: list[Tool], add_generation_prompt: bool
    ) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                dialogue,
                tools=tools or None,
                chat_template=self._template,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **self._variables,
            )
        except Exception as error:  # a chat template is foreign code and may raise anything
            raise PromptError(
                f"the chat template of {self._tokenizer.name_or_path or 'the tokenizer'} refuses "
                f"the conversation: {error}"
            ) from error
        return text

    def _beginning(self) -> str:
        """The token that the tokenizer itself puts before a text, if it does."""
        ids = self._tokenizer("")["input_ids"]
        bos = self._tokenizer.bos_token
        return bos if bos is not None and ids[:1] == [self._tokenizer.bos_token_id] else ""


def _check(prompt: ChunkedPrompt) -> None:
    if not prompt.messages:
        raise PromptError(f"the prompt for task {prompt.task!r} has no messages")
    for message in prompt.messages:
        _check_message(message)


def _check_message(message: Message) -> None:
    if message.role not in MESSAGE_ROLES:
        known = ", ".join(MESSAGE_ROLES)
        raise PromptError(f"unknown message role {message.role!r}; use one of {known}")
    for chunk in message.chunks:
        if not isinstance(chunk.text, str):
            raise PromptError(f"chunk {chunk.id!r} holds a {type(chunk.text).__name__}, not text")
        _check_unicode(chunk.text, f"chunk {chunk.id!r}")


def _check_unicode(text: str, name: str) -> None:
    if wrong := not_unicode(text):
        raise PromptError(f"{name} {wrong}")


def _spans(rendering: Rendering, tokens: Tokens) -> tuple[Span, ...]:
    """Cut between tokens: a span holds the tokens that end within its characters."""
    stops = np.array([stop for _, stop in rendering.stops])
    cuts = np.searchsorted(tokens.ends, stops, side="right")
    cuts[stops == 0] = 0
    cuts[-1] = len(tokens.ids)
    ids, spans, start = UniqueIds(), [], 0
    for (label, _), cut in zip(rendering.stops, cuts.tolist(), strict=True):
        spans.append(Span(ids.new(label.id), label.role, start, cut, label.digest))
        start = cut
    return tuple(spans)
