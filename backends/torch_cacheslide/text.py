"""The text of an answer as it is generated, and where it ends.

In: token ids one by one. Out: text that will not be taken back, without stop strings, and whether
the answer is finished.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from copy import copy
from typing import Self

from transformers import PreTrainedTokenizerBase

from torch_cacheslide.detokenize import detokenizer_of
from torch_cacheslide.stops import StopFinder


class TextStream:
    """Detokenises and watches for the end: `eos_ids`, `stop_token_ids` or a `stop` string.

    The deltas together are the text of all tokens (special ones skipped) up to the first stop
    string completed, that string and everything after it left out; a token that ends the answer
    adds no text. Text that may be the beginning of a stop string, and bytes that are not yet a
    character, are held back.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop: Sequence[str] = (),
        stop_token_ids: Collection[int] = (),
        eos_ids: Collection[int] = (),
    ) -> None:
        self._detokenizer = detokenizer_of(tokenizer)
        self._stops = StopFinder(stop)
        self._ends = frozenset((*stop_token_ids, *eos_ids))
        self._finished = False

    def push(self, token_id: int) -> tuple[str, bool]:
        """The text that became certain with `token_id`, and whether the answer ends here."""
        if self._finished:
            return "", True
        if token_id in self._ends:
            return self.flush(), True
        text, self._finished = self._stops.feed(self._detokenizer.push(token_id))
        return text, self._finished

    def flush(self) -> str:
        """Everything held back; the answer ends (at a length limit, say). Empty when it has."""
        if self._finished:
            return ""
        self._finished = True
        text, stopped = self._stops.feed(self._detokenizer.flush())
        return text if stopped else text + self._stops.flush()

    def fork(self) -> Self:
        """Another answer that begins like this one."""
        twin = copy(self)
        twin._detokenizer, twin._stops = self._detokenizer.fork(), self._stops.fork()
        return twin
