"""A model and its tokenizer, loaded and checked, ready to be run.

In: a local folder, an alias (`smollm2-135m`), a `.gguf` file or a hub id, with device and dtype.
Out: a `LoadedModel`. What cannot be computed rightly is refused before its weights are read.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from cacheslide_agents.errors import ModelLoadError
from cacheslide_agents.paths import short_name
from cacheslide_agents.weights.checkpoint import read_config, tensor_entries
from cacheslide_agents.weights.fingerprint import fingerprint
from torch_cacheslide.architecture import check_layers, check_model_type
from torch_cacheslide.cope import register_cope
from torch_cacheslide.locate import locate
from torch_cacheslide.pretrained import DTYPES, read_pretrained

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")
_NAMES_SHOWN = 3


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A causal language model in eval mode, without gradients, and what belongs to it.

    `fingerprint` goes into every cache key: equal weights, config and dtype share it.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    model_id: str
    path: Path
    fingerprint: str


def load_model(
    name: str | Path,
    *,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype = torch.float32,
    attn_implementation: str = "sdpa",
) -> LoadedModel:
    """Find, check and load `name`: a folder, an alias, a `.gguf` file or a hub id.

    Raises `ModelNotFoundError` (nothing of that name), `UnsupportedModelError` (a family, layer
    type or position scheme we do not compute) or `ModelLoadError` (files missing, damaged or not
    fitting together, non-finite weights, a device or dtype that is not there).
    """
    place, precision = _device(device), _dtype(dtype)
    folder = locate(name)
    raw_config = read_config(folder)
    check_model_type(raw_config, folder)
    register_cope()
    config = read_pretrained(AutoConfig, folder, "config.json cannot be used")
    check_layers(config, folder)
    tensor_entries(folder)
    tokenizer = _load_tokenizer(folder, config.vocab_size)
    model = _load_weights(folder, config, place, precision, attn_implementation)
    _check_finite(model, folder, precision)
    model_id = short_name(name)
    return LoadedModel(model, tokenizer, model_id, folder, fingerprint(folder, precision))


def _device(device: str | torch.device) -> torch.device:
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise ModelLoadError(f"device {device!r} is unknown; use 'cpu' or 'cuda'") from error
    if place.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (place.index or 0) >= count:
            raise ModelLoadError(
                f"device {str(device)!r} was asked for but this machine offers {count} CUDA "
                "devices to torch; use device='cpu', or install a CUDA build of torch"
            )
    elif place.type != "cpu":
        raise ModelLoadError(f"device {str(device)!r} is not handled; use 'cpu' or 'cuda'")
    return place


def _dtype(dtype: str | torch.dtype) -> torch.dtype:
    precision = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if precision not in DTYPES.values():
        raise ModelLoadError(f"dtype {dtype!r} is unknown; use one of {', '.join(DTYPES)}")
    assert precision is not None
    return precision


def _load_tokenizer(folder: Path, vocabulary: int) -> PreTrainedTokenizerBase:
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise ModelLoadError(
            f"{folder} has no tokenizer ({' or '.join(_TOKENIZER_FILES)}); copy the files that "
            "came with the model, or write them with tokenizer.save_pretrained"
        )
    tokenizer: PreTrainedTokenizerBase = read_pretrained(
        AutoTokenizer, folder, "its tokenizer cannot be read; copy the model's own files again"
    )
    # A padding or unknown token that its class added on top is never in a prompt: not asked for.
    ends = (tokenizer.bos_token_id, tokenizer.eos_token_id)
    highest = max(tokenizer.vocab_size - 1, *(end for end in ends if end is not None), 0)
    if highest >= vocabulary:
        raise ModelLoadError(
            f"{folder}: the tokenizer has ids up to {highest} but the model embeds only "
            f"{vocabulary} tokens; put back the model's own tokenizer"
        )
    return tokenizer


def _load_weights(
    folder: Path, config: Any, device: torch.device, dtype: torch.dtype, attn_implementation: str
) -> PreTrainedModel:
    direct = device.type != "cpu" and find_spec("accelerate") is not None  # not by way of the host
    model, report = read_pretrained(
        AutoModelForCausalLM,
        folder,
        "its weights cannot be loaded",
        config=config,
        dtype=dtype,
        attn_implementation=attn_implementation,
        device_map={"": device} if direct else None,
        use_safetensors=True,
        ignore_mismatched_sizes=True,  # reported, so that we can name them
        output_loading_info=True,
    )
    wrong = {
        "lacks": report["missing_keys"],
        "holds wrongly shaped": {key for key, *_ in report["mismatched_keys"]},
        "holds unknown": report["unexpected_keys"],
    }
    for verb, keys in wrong.items():
        if keys:
            raise ModelLoadError(_misfit(folder, config.model_type, verb, sorted(keys)))
    loaded: PreTrainedModel = (model if direct else model.to(device)).eval().requires_grad_(False)
    return loaded


def _misfit(folder: Path, model_type: str, verb: str, keys: list[str]) -> str:
    shown = ", ".join(keys[:_NAMES_SHOWN]) + (", ..." if len(keys) > _NAMES_SHOWN else "")
    return (
        f"{folder} does not fit its config.json ({model_type}): the checkpoint {verb} {len(keys)} "
        f"tensors ({shown}); fetch config and weights of the same model"
    )


def _check_finite(model: nn.Module, folder: Path, dtype: torch.dtype) -> None:
    """One pass over the weights: a NaN or infinity anywhere makes its tensor's sum non-finite."""
    sums = {name: _total(weight) for name, weight in model.named_parameters()}
    suspects = [name for name, total in sums.items() if not torch.isfinite(total)]
    for name in suspects:
        if not torch.isfinite(model.get_parameter(name)).all():
            raise ModelLoadError(
                f"{folder}: weight {name} is NaN or infinite in {dtype}; the file is damaged, or "
                "was trained for a wider range (then use dtype='bfloat16' or 'float32')"
            )


def _total(weight: Tensor) -> Tensor:
    return weight.sum(dtype=torch.float64 if weight.dtype == torch.float64 else torch.float32)
