"""What differs between model families that pass the checks of `architecture`.

In: a loaded model or its config. Out: its layers as a stack, its position scheme, its window, its
end tokens.
"""

from __future__ import annotations

from typing import Any

from cacheslide_agents.errors import ModelLoadError
from cacheslide_agents.position.alibi import Alibi
from cacheslide_agents.position.base import Position
from cacheslide_agents.position.contextual import Contextual
from cacheslide_agents.position.rotary import Rotary
from torch_cacheslide.mpt import MptStack
from torch_cacheslide.stack import DecoderStack


def stack_of(model: Any) -> DecoderStack:
    return MptStack(model) if model.config.model_type == "mpt" else DecoderStack(model)


def position_of(config: Any) -> Position:
    if config.model_type == "mpt":
        return Alibi.from_config(config)
    return Contextual() if config.model_type == "cope_llama" else Rotary.from_config(config)


def window_of(config: Any) -> int:
    """Tokens that prompt and answer may have together."""
    mpt = config.model_type == "mpt"
    return int(config.max_seq_len if mpt else config.max_position_embeddings)


def ends_of(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Every id the model or its tokenizer calls the end."""
    declared = model.generation_config.eos_token_id
    ids = declared if isinstance(declared, list) else [declared]
    ends = [id_ for id_ in (*ids, tokenizer.eos_token_id) if id_ is not None]
    if not all(isinstance(id_, int) for id_ in ends):
        raise ModelLoadError(
            f"generation_config.json: eos_token_id={declared!r} must be a token id or a list of "
            "them; fetch the file again"
        )
    return tuple(set(ends))
