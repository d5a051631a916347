"""Adapters that turn a rotary model into a CoPE one.

In: a folder with `cope.safetensors` (low-rank factors `<module>.lora_A` [rank, in] and `.lora_B`
[out, rank], position embeddings) and `cope.json` (which base it is bound to, and how it was
trained). Out: the converted model, in memory or as a folder that loads like any other.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from cacheslide_agents.errors import ModelLoadError
from cacheslide_agents.weights.fingerprint import file_digest
from torch_cacheslide.binding import BaseTensor, check_base
from torch_cacheslide.cope import cope_from_llama
from torch_cacheslide.derived import derived
from torch_cacheslide.pretrained import DTYPES, read_pretrained
from torch_cacheslide.quiet import quiet

WEIGHTS, CARD = "cope.safetensors", "cope.json"
FORMAT = 1
EMBEDDING = "cope_embedding"
MOST_POSITIONS = 32768
"""So that masses, one less at most, fit into the 16 bits of a CCPE profile."""
HISTORY = ("recipe", "tokens", "seconds", "threads", "before")
"""What a card says of a training."""
_NO_CARD = (
    *(ArithmeticError, AttributeError, KeyError, OSError),
    *(RecursionError, TypeError, ValueError),
)


def is_adapter(folder: Path) -> bool:
    """Whether `folder` holds an adapter and no whole model."""
    return (folder / WEIGHTS).is_file() and not (folder / "config.json").exists()


@dataclass(frozen=True)
class Adapter:
    """`base` is the name of the model it was trained from; `bound`, that model's own tensors in
    the precision `dtype`; `history`, what its card says of its training."""

    folder: Path
    base: str
    dtype: torch.dtype
    npos: int
    bound: Mapping[str, BaseTensor]
    tensors: Mapping[str, Tensor]
    history: Mapping[str, Any]

    @classmethod
    def read(cls, folder: Path) -> Adapter:
        """Raises `ModelLoadError` for missing, damaged or newer files."""
        try:
            card = json.loads((folder / CARD).read_text(encoding="utf-8"))
            if card["format"] != FORMAT:
                raise ValueError(f"format {card['format']} is not {FORMAT}")
            bound = {
                name: BaseTensor(each["digest"], tuple(map(float, each["values"])))
                for name, each in card["bound"].items()
            }
            base, npos = str(card["base"]), card["recipe"]["npos"]
            if type(npos) is not int or not 2 <= npos <= MOST_POSITIONS:
                raise ValueError(f"npos {npos!r} is no whole number from 2 to {MOST_POSITIONS}")
            dtype = DTYPES[card["dtype"]]
            history = {name: card.get(name) for name in HISTORY}
        except _NO_CARD as error:
            raise ModelLoadError(
                f"{folder / CARD} is not the card of a conversion: {error}"
            ) from error
        try:
            tensors = load_file(folder / WEIGHTS)
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(f"{folder / WEIGHTS} cannot be read: {error}") from error
        return cls(folder, base, dtype, npos, bound, tensors, history)

    def applied(self, base: Any, *, other_precision: bool = False) -> Any:
        """The CoPE model of `base`, which itself stays as it is.

        Raises `ModelLoadError` for another base, and, unless `other_precision`, for the same model
        in another precision.
        """
        self.check(base, other_precision=other_precision)
        with self._whole():
            pairs, embeddings = self._parts()
            model = cope_from_llama(base, self.npos)
            parameters = dict(model.named_parameters())
            _check_names(embeddings, [name for name in parameters if name.endswith(EMBEDDING)])
            with torch.no_grad():
                for module, factors in pairs.items():
                    _add(parameters[f"{module}.weight"], _product(module, *factors), module)
                for name, value in embeddings.items():
                    _add(parameters[name], value, name)
        return model.eval().requires_grad_(False)

    def copy_into(self, parameters: Mapping[str, Tensor]) -> None:
        """Overwrites tensors of the same names with the factors and embeddings of this adapter.

        Raises `ModelLoadError` unless names and shapes are the same.
        """
        with self._whole(), torch.no_grad():
            _check_names(self.tensors, parameters)
            for name, value in self.tensors.items():
                if value.shape != parameters[name].shape:
                    raise ValueError(f"{name} is {list(value.shape)}")
                parameters[name].copy_(value)

    @contextmanager
    def _whole(self) -> Iterator[None]:
        try:
            yield
        except (KeyError, RuntimeError, ValueError) as error:
            raise ModelLoadError(
                f"{self.folder / WEIGHTS} does not fit its card or its base model ({error}); copy "
                "the adapter's two files again, from one training"
            ) from error

    @property
    def rank(self) -> int:
        """Of its low-rank factors. Raises `ModelLoadError` where they are not what they should be,
        or differ in rank."""
        with self._whole():
            ranks = {len(down) for down, _ in self._parts()[0].values()}
            if len(ranks) != 1:
                raise ValueError(f"its factors have {len(ranks)} ranks")
        return ranks.pop()

    def check(self, base: Any, *, other_precision: bool = False) -> None:
        """Raises `ModelLoadError` if `base` is not the model that this was trained from."""
        check_base(base, self.bound, f"the adapter {self.folder}", other_precision=other_precision)

    def _parts(self) -> tuple[dict[str, tuple[Tensor, Tensor]], dict[str, Tensor]]:
        """Low-rank factors by module, and embeddings by name; nothing may be left over."""
        for name, value in self.tensors.items():
            if not value.is_floating_point() or not bool(torch.isfinite(value).all()):
                raise ValueError(f"{name} is not finite")
        embeddings = {n: value for n, value in self.tensors.items() if n.endswith(EMBEDDING)}
        others = self.tensors.keys() - embeddings.keys()
        modules = {name.rpartition(".lora_")[0] or name for name in others}
        _check_names(modules, [name.removesuffix(".weight") for name in self.bound])
        pairs = {m: (self.tensors[f"{m}.lora_A"], self.tensors[f"{m}.lora_B"]) for m in modules}
        _check_names(self.tensors, [*embeddings, *(f"{m}.lora_{x}" for m in modules for x in "AB")])
        return pairs, embeddings


def _check_names(found: Iterable[str], wanted: Iterable[str]) -> None:
    if different := set(found) ^ set(wanted):
        raise ValueError(f"{min(different)} is missing, or is too much")


def _product(module: str, down: Tensor, up: Tensor) -> Tensor:
    """What factors [rank, in] and [out, rank] add to a weight [out, in]."""
    if down.dim() != 2 or up.dim() != 2 or not len(down):
        raise ValueError(f"the factors of {module} are no matrices")
    return up.float() @ down.float()


def _add(parameter: Tensor, value: Tensor, name: str) -> None:
    """New embeddings are zero until then."""
    if parameter.shape != value.shape:
        raise ValueError(f"{name} is {list(value.shape)}, not {list(parameter.shape)}")
    parameter += value.to(parameter)


def merged(adapter: Adapter, base: Path, models: Path) -> Path:
    """The folder under `models` in which `base`, a model folder, has `adapter` added to it."""
    files = [file_digest(adapter.folder / name) for name in (WEIGHTS, CARD)]
    digest = blake2b(repr((files, str(base))).encode(), digest_size=6).hexdigest()
    target = models / f"{adapter.folder.name}-{digest}"
    return derived(target, adapter.folder, lambda folder: _merge(adapter, base, folder))


def _merge(adapter: Adapter, base: Path, folder: Path) -> None:
    trouble = f"the base model of the adapter {adapter.folder} cannot be loaded"
    model = read_pretrained(AutoModelForCausalLM, base, trouble, dtype=adapter.dtype)
    tokenizer = read_pretrained(AutoTokenizer, base, trouble)
    merged = adapter.applied(model)
    with quiet():
        merged.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
