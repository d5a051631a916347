"""What a prediction has to know of a model: its tokenizer, its sizes, its prices.

In: a model folder. Out: a `ReplayModel`; weights are not read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from cacheslide_agents.errors import DataError, RequestError
from cacheslide_agents.foreign_json import parsed
from cacheslide_agents.policies.cost import CostModel, Geometry
from cacheslide_agents.prompt.chat import ChatEncoder
from cacheslide_agents.prompt.tokens import load_tokenizer

NUMBER_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
_UNFIT = (
    *(ArithmeticError, AttributeError, KeyError, OSError, TypeError, ValueError),
    *(DataError, RequestError),
)


@dataclass(frozen=True)
class ReplayModel:
    """`window`: prompt tokens the model can take. `cost` predicts seconds once it has a basis."""

    tokenizer: Any
    encoder: ChatEncoder
    geometry: Geometry
    window: int
    cost: CostModel

    @classmethod
    def read(cls, folder: Path, dtype: str = "float32") -> ReplayModel:
        """`dtype` of the keys and values. `DataError` when config.json lacks what is needed."""
        if dtype not in NUMBER_BYTES:
            raise RequestError(f"dtype {dtype!r} is unknown; known: {', '.join(NUMBER_BYTES)}")
        try:
            text = (folder / "config.json").read_text(encoding="utf-8")
            config = parsed(text, "config.json", finite=True)
            sizes = Geometry.from_config(SimpleNamespace(**config))
            geometry = replace(sizes, kv_bytes=NUMBER_BYTES[dtype])
            window, cost = int(config["max_position_embeddings"]), CostModel(geometry)
        except _UNFIT as error:
            raise DataError(
                f"{folder / 'config.json'} does not describe a decoder: {error}"
            ) from error
        tokenizer = load_tokenizer(folder)
        return cls(tokenizer, ChatEncoder(tokenizer), geometry, window, cost)

    @property
    def token_bytes(self) -> int:
        """Bytes of one stored token: keys and values of every layer."""
        sizes = self.geometry
        return 2 * sizes.layers * sizes.kv_heads * sizes.head_dim * sizes.kv_bytes

    def output_ids(self, output: str | tuple[int, ...]) -> tuple[int, ...]:
        """Tokens of an answer; its text is tokenised alone, which may differ by a token or two."""
        if isinstance(output, tuple):
            return output
        return (
            tuple(self.tokenizer(output, add_special_tokens=False)["input_ids"]) if output else ()
        )
