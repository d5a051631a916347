"""The model that learns: which of its tensors are trained, and what comes of them.

In: a Llama model, a recipe, perhaps an adapter to start from. Out: a CoPE model with trainable
attention projections (or low-rank adapters of them, by peft) and position embeddings; at the end,
its plain weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from cacheslide_agents.errors import BackendError, RequestError, install_hint
from cacheslide_agents.training.recipe import Recipe
from torch_cacheslide.adapter import EMBEDDING, Adapter
from torch_cacheslide.cope import cope_from_llama

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


class Student:
    """`model` shares all that is not trained with its teacher."""

    def __init__(self, teacher: Any, recipe: Recipe, start: Adapter | None = None) -> None:
        self.rank = recipe.adapter_rank
        if start is not None and start.npos != recipe.npos:
            raise RequestError(f"{start.folder} has {start.npos} positions, not {recipe.npos}")
        if start is not None and self.rank is None:
            self.model: Any = start.applied(teacher)
        else:
            self.model = cope_from_llama(teacher, recipe.npos).requires_grad_(False)
        if self.rank is not None:
            _add_adapters(self.model, self.rank, recipe.seed)
        for name, parameter in self.model.named_parameters():
            trained = EMBEDDING in name or ("lora_" in name if self.rank else _projects(name))
            parameter.requires_grad_(trained)
        if start is not None and self.rank is not None:
            start.check(teacher)
            _copy(start, self.adapter())

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        return {n: p for n, p in self.model.named_parameters() if p.requires_grad}

    def adapter(self) -> dict[str, Tensor]:
        """The low-rank factors and embeddings: `<module>.lora_A` [rank, in], `.lora_B` [out, rank].

        Their product, as it is, is what the module's weight gains.
        """
        return {
            name.removesuffix(".weight").removesuffix(".default"): parameter.detach()
            for name, parameter in self.trained.items()
        }

    def merge(self) -> Any:
        """The model with plain weights: adapters are added to what they adapt."""
        for layer in self.model.model.layers:
            attention = layer.self_attn
            for name in PROJECTIONS:
                module = getattr(attention, name)
                if hasattr(module, "get_delta_weight"):
                    plain = module.get_base_layer()
                    plain.weight.data += module.get_delta_weight("default")
                    setattr(attention, name, plain)
        self.rank = None
        return self.model.requires_grad_(False).eval()


def _projects(name: str) -> bool:
    return ".self_attn." in name and any(f".{each}." in name for each in PROJECTIONS)


def _copy(start: Adapter, into: Mapping[str, Tensor]) -> None:
    """The adapter's own factors and embeddings, where training goes on with them."""
    shapes = {name: tuple(value.shape) for name, value in into.items()}
    if {name: tuple(value.shape) for name, value in start.tensors.items()} != shapes:
        raise RequestError(
            f"the adapter {start.folder} has another rank than --adapter-rank; name its own, or "
            "leave it out to train all weights from there"
        )
    for name, value in start.tensors.items():
        into[name].copy_(value)


def _add_adapters(model: nn.Module, rank: int, seed: int) -> None:
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise BackendError(f"adapter_rank needs peft ({error}); {install_hint('train')}") from error
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = LoraConfig(r=rank, lora_alpha=rank, target_modules=list(PROJECTIONS))
        inject_adapter_in_model(config, model)
