"""What a prediction has to know of a model: its tokenizer, its sizes, its prices.

In: a model folder. Out: a `ReplayModel`; weights are not read.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from cacheslide_agents.errors import DataError, RequestError
from cacheslide_agents.policies.cost import CostModel, Geometry
from cacheslide_agents.prompt.chat import ChatEncoder
from cacheslide_agents.prompt.tokens import load_tokenizer

NUMBER_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


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
        tokenizer = load_tokenizer(folder)
        try:
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            sizes = Geometry.from_config(SimpleNamespace(**config))
            window = int(config["max_position_embeddings"])
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise DataError(
                f"{folder / 'config.json'} does not describe a decoder: {error}"
            ) from error
        geometry = replace(sizes, kv_bytes=NUMBER_BYTES[dtype])
        return cls(tokenizer, ChatEncoder(tokenizer), geometry, window, CostModel(geometry))

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
