"""Tool calls in the text of an answer, found while it is generated.

In: pieces of text. Out: what is said, and pieces of calls: the name first, then the arguments as
they come.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass, replace

from cacheslide_agents.prompt.calls import CallFormat


@dataclass(frozen=True, slots=True)
class CallPiece:
    """More of call `index`; `name` comes with the first piece, `None` if the call has none."""

    index: int
    name: str | None
    arguments: str
    first: bool


_HEAD = re.compile(
    r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)


class JsonScanner:
    """Follows JSON text character by character: which brackets are open, whether in a string."""

    def __init__(self) -> None:
        self.open: list[str] = []
        self._string = self._escaped = False

    def feed(self, letter: str) -> None:
        if self._string:
            self._string = letter != '"' or self._escaped
            self._escaped = letter == "\\" and not self._escaped
        elif letter == '"':
            self._string = True
        elif letter in "{[":
            self.open.append("}" if letter == "{" else "]")
        elif self.open and letter == self.open[-1]:
            self.open.pop()

    def spoiler(self) -> str:
        """Text after which nobody can repair what was scanned into a whole.

        langchain-core completes broken arguments and reports the call as valid; a call that was
        cut off must never be run.
        """
        leave = ("\\" if self._escaped else "") + '"' if self._string else ""
        return leave + ("]" if self.open[-1:] == ["}"] else "}")


class CallReader:
    """Splits an answer into text and calls. White space before a call is the call's own.

    An object that begins like a call, without arguments and with a name none of `tools` has, is
    what the answer says.
    """

    def __init__(self, style: CallFormat, tools: Collection[str] = ()) -> None:
        self._style, self._tools = style, tools
        self._held = ""
        self._inside = False  # of a group of calls, behind its marker
        self._group_calls = 0
        self._call: _OneCall | None = None
        self.count = 0
        self.broken = 0

    def feed(self, text: str) -> tuple[str, list[CallPiece]]:
        """What `text` made certain: more of what is said, and pieces of calls."""
        self._held += text
        said: list[str] = []
        pieces: list[CallPiece] = []
        while self._held and self._step(said, pieces):
            pass
        return "".join(said), joined(pieces)

    def finish(self) -> tuple[str, list[CallPiece]]:
        """Everything held back; a call that is not whole becomes an invalid one."""
        if self._call is not None:
            return "", self._close(self._call.abandoned())
        held, self._held = self._held, ""
        if self._inside:
            return "", [] if self._group_calls else self._empty_group(held)
        begun = self.count > 0 and self._style.marker.startswith(held.strip())
        return "" if begun else held, []

    def _step(self, said: list[str], pieces: list[CallPiece]) -> bool:
        """Read as far as one state reaches; whether there is more to read."""
        if self._call is not None:
            self._held, found, done = self._call.feed(self._held)
            if done and self._call.speech and not self._group_calls:
                said.append(self._spoken(self._call.speech))
            else:
                pieces += self._close(found) if done else found
            return done
        return self._between(pieces) if self._inside else self._speech(said)

    def _speech(self, said: list[str]) -> bool:
        marker, place = self._style.marker, self._held.find(self._style.marker)
        if place < 0:
            keep = _tail_that_may_begin(self._held, marker)
            said.append(self._held[:keep])
            self._held = self._held[keep:]
            return False
        said.append(self._held[:place].rstrip())
        self._held = self._held[place + self._style.skipped :]
        self._inside, self._group_calls = True, 0
        return True

    def _between(self, pieces: list[CallPiece]) -> bool:
        """Inside a group, before, between or behind its calls."""
        end, start = self._style.end, self._held.find("{")
        stop = self._held.find(end) if end else -1
        if stop >= 0 and not 0 <= start < stop:
            inner, self._held = self._held[:stop], self._held[stop + len(end) :]
            if not self._group_calls:
                pieces += self._empty_group(inner)
            self._inside = False
            return True
        if start < 0:
            return False
        self._held = self._held[start:]
        self._call = _OneCall(self.count, self._tools)
        return True

    def _spoken(self, text: str) -> str:
        """What was taken for a call, with what of the marker had been passed over."""
        self._call, self._inside = None, False
        return self._style.marker[: self._style.skipped] + text

    def _close(self, found: list[CallPiece]) -> list[CallPiece]:
        if self._call is not None:
            self.broken += self._call.broken
        self._call = None
        self.count += 1
        self._group_calls += 1
        self._inside = bool(self._style.end)
        return found

    def _empty_group(self, text: str) -> list[CallPiece]:
        """A marker, and no JSON behind it."""
        piece = CallPiece(self.count, None, f"{text.strip()}}}", True)
        self.count += 1
        self.broken += 1
        return [piece]


class _OneCall:
    """One JSON object: a name and arguments, if it is as it should be, or `speech` after all."""

    def __init__(self, index: int, tools: Collection[str]) -> None:
        self.index, self._tools = index, tools
        self.broken = False
        self.speech = ""
        self._raw = ""
        self._scanner = JsonScanner()
        self._begun = self._ended = False

    def feed(self, text: str) -> tuple[str, list[CallPiece], bool]:
        """(text behind the call, pieces, whether the call is over)."""
        pieces: list[CallPiece] = []
        fresh = ""  # arguments since the last piece
        for place, letter in enumerate(text, start=1):
            self._raw += letter
            self._scanner.feed(letter)
            depth = len(self._scanner.open)
            if not self._begun and letter == "{" and depth == 2:
                pieces += self._begin()
            if self._begun and not self._ended:
                fresh += letter
                self._ended = depth < 2
            if depth == 0:
                pieces += self._more(fresh) if self._begun else self._late()
                return text[place:], pieces, True
        return "", [*pieces, *self._more(fresh)], False

    def abandoned(self) -> list[CallPiece]:
        """The answer ended inside the call."""
        if self._begun and self._ended:
            return []
        self.broken = True
        if self._begun:
            return self._more(self._scanner.spoiler())
        return [CallPiece(self.index, None, self._raw + self._scanner.spoiler(), True)]

    def _begin(self) -> list[CallPiece]:
        head = _HEAD.match(self._raw)
        if head is None or head.end() != len(self._raw) - 1:
            return []
        self._begun = True
        return [CallPiece(self.index, str(json.loads(head[1])), "", True)]

    def _more(self, arguments: str) -> list[CallPiece]:
        return [CallPiece(self.index, None, arguments, False)] if arguments else []

    def _late(self) -> list[CallPiece]:
        """The whole object, where its parts came in another order or form."""
        try:
            found = json.loads(self._raw)
        except ValueError:
            found = {}
        name = found.get("name")
        if not {"arguments", "parameters"} & {*found} and name not in self._tools:
            self.speech = self._raw
        arguments = found.get("arguments", found.get("parameters", {}))
        if isinstance(name, str) and isinstance(arguments, dict | str):
            shown = arguments if isinstance(arguments, str) else json.dumps(arguments)
            return [CallPiece(self.index, name, shown, True)]
        self.broken = True
        return [CallPiece(self.index, None, self._raw + "}", True)]


def joined(pieces: list[CallPiece]) -> list[CallPiece]:
    """One piece a call: LangChain adds up pieces of different messages only."""
    whole: list[CallPiece] = []
    for piece in pieces:
        if whole and whole[-1].index == piece.index:
            whole[-1] = replace(whole[-1], arguments=whole[-1].arguments + piece.arguments)
        else:
            whole.append(piece)
    return whole


def _tail_that_may_begin(text: str, marker: str) -> int:
    """Where the text begins that cannot be let go: white space, and what may become the marker."""
    keep = len(text)
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            keep -= length
            break
    return len(text[:keep].rstrip())
