"""Finds where the chunks of a conversation come out of the model's chat template.

In: messages, tools and a function that renders them. Out: the rendered text, the place of every
chunk in it, and the places of control tokens that the template itself wrote.

A chat template is a program: it trims, moves and drops text. So the conversation is rendered twice,
plainly and with a sentinel at every chunk border. If taking the sentinels out again gives the plain
rendering, they show the borders; if not, borders inside messages are given up, and then all.
"""

from __future__ import annotations

import re
import secrets
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from cacheslide_agents.chunks import Message, Role, text_digest
from cacheslide_agents.prompt.bordered import Bordered, Label
from cacheslide_agents.prompt.control import ControlTokens
from cacheslide_agents.prompt.shield import Shield
from cacheslide_agents.prompt.tools import TOOLS, Tool, marked_tools, schema_lines

Render = Callable[[list[dict[str, Any]], list[Tool]], str]
Stops = list[tuple[Label, int]]
"""Chunks, each with the character it ends before."""
Places = dict[int, dict[int, int]]
"""By message and border: where its sentinel stood, in characters of the text without sentinels."""

WHOLE_PROMPT = "prompt"
GENERATION_PROMPT = "generation-prompt"
_BORDER = re.compile(r"(\d+)b(\d+)z")
"""What follows a sentinel's nonce: message and border."""


@dataclass(frozen=True, slots=True)
class Rendering:
    """`stops` in the order the chunks came out; the last one is the end of `text`.

    `markup`: characters [start, stop) of each control token that no value brought along.
    """

    text: str
    stops: Stops
    markup: list[tuple[int, int]]


def render_chunks(
    messages: Sequence[Message], tools: list[Tool], render: Render, controls: ControlTokens
) -> Rendering:
    """Render a conversation and find its chunks; calls `render` two to four times."""
    shield = Shield(controls)
    schemas = Label(TOOLS, Role.REUSE, text_digest(schema_lines(tools)))
    tools = shield.nested(tools)
    extras = [shield.extra(message.role, message.extra) for message in messages]
    bordered = [Bordered.of(message, shield) for message in messages]

    def rendered(contents: list[str], tools: list[Tool]) -> str:
        rows = zip(messages, contents, extras, strict=True)
        return render(
            [{**extra, "role": m.role, "content": text} for m, text, extra in rows], tools
        )

    plain = rendered([part.content for part in bordered], tools)
    for parts, mark_tools in _attempts(bordered, tools):
        sentinels = _Sentinels(secrets.token_hex(8))
        contents = [part.marked(sentinels.of(index)) for index, part in enumerate(parts)]
        shown = marked_tools(tools, sentinels.of(len(parts))) if mark_tools else tools
        places = sentinels.read(rendered(contents, shown), plain)
        stops = None if places is None else _stops(parts, places, plain)
        if places is not None and stops is not None:
            markup = _markup(plain, places, controls)
            if len(parts) in places:
                stops.append((schemas, _tools_stop(places, len(parts), plain, markup)))
            return _finished(plain, stops, markup, shield)
    whole = Label(WHOLE_PROMPT, Role.RECOMPUTE, text_digest(shield.lifted(plain).text))
    return _finished(plain, [(whole, len(plain))], _markup(plain, {}, controls), shield)


def _attempts(bordered: list[Bordered], tools: list[Tool]) -> Iterator[tuple[list[Bordered], bool]]:
    """Which borders to mark, finest first, and whether to mark the tools."""
    if tools:
        yield bordered, True
    yield bordered, False
    merged = [part.merged() for part in bordered]
    if merged != bordered:
        yield merged, False


@dataclass(frozen=True, slots=True)
class _Sentinels:
    """Letters and digits only, so that trimming and JSON leave them whole."""

    nonce: str

    def of(self, message: int) -> Callable[[int], str]:
        return lambda border: f"zq{self.nonce}m{message}b{border}z"

    def read(self, marked: str, plain: str) -> Places | None:
        """Where they came out; `None` if they changed the rendering or one came out twice."""
        first, *rest = marked.split(f"zq{self.nonce}m")
        texts, borders = [first], []
        for part in rest:
            if (found := _BORDER.match(part)) is None:
                return None
            borders.append((int(found[1]), int(found[2])))
            texts.append(part[found.end() :])
        if "".join(texts) != plain:
            return None
        places: Places = {}
        for (message, border), place in zip(borders, accumulate(map(len, texts)), strict=False):
            if places.setdefault(message, {}).setdefault(border, place) != place:
                return None
        return places


def _stops(parts: list[Bordered], places: Places, plain: str) -> Stops | None:
    """Where chunks end, in prompt order; an empty one stands where the one before it ended."""
    stops: Stops = []
    last = 0
    for index, part in enumerate(parts):
        ends = part.ends(places.get(index, {}), plain)
        if ends is None:
            return None
        for label, end in zip(part.labels, ends, strict=True):
            last = last if end is None else end
            stops.append((label, last))
    return stops


def _markup(plain: str, places: Places, controls: ControlTokens) -> list[tuple[int, int]]:
    """Control tokens in the text, but none that forms only where a value meets its surroundings."""
    borders = sorted(place for found in places.values() for place in found.values())

    def straddles(start: int, stop: int) -> bool:
        index = bisect_right(borders, start)
        return index < len(borders) and borders[index] < stop

    spans = (match.span() for match in controls.pattern.finditer(plain))
    return [span for span in spans if not straddles(*span)]


def _tools_stop(places: Places, index: int, plain: str, markup: list[tuple[int, int]]) -> int:
    """The tool schemas end with the line of the last one, or where other text follows on it."""
    last = max(places[index].values())
    others = (place for found in places.values() for place in found.values() if place > last)
    controls = (start for start, _ in markup if start >= last)
    newline = plain.find("\n", last)
    return min((*others, *controls, len(plain) if newline < 0 else newline))


def _finished(plain: str, stops: Stops, markup: list[tuple[int, int]], shield: Shield) -> Rendering:
    """Order the chunks, add what the template put after the last one, and lift the shield."""
    stops = sorted(stops, key=lambda stop: stop[1])
    end = stops[-1][1] if stops else 0
    label = Label(GENERATION_PROMPT, Role.RECOMPUTE, text_digest(plain[end:]))
    stops.append((label, len(plain)))
    lifted = shield.lifted(plain)
    return Rendering(
        lifted.text,
        [(label, lifted.move(stop)) for label, stop in stops],
        [(lifted.move(start), lifted.move(stop)) for start, stop in markup],
    )
