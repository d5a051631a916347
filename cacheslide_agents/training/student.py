"""The model that learns: which of its tensors are trained, and what comes of them.

In: a Llama model, a recipe, perhaps an adapter to start from. Out: a CoPE model with trainable
attention projections (or low-rank adapters of them, by peft) and position embeddings; at the end,
its plain weights.
"""

from __future__ import annotations

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
        if start is not None:
            _check(start, teacher, recipe)
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
            start.copy_into(self.adapter())

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


def _check(start: Adapter, teacher: Any, recipe: Recipe) -> None:
    """Whether training by `recipe` can go on from `start`."""
    start.check(teacher)
    rank, npos = start.rank, start.npos
    if npos != recipe.npos:
        raise RequestError(
            f"the adapter {start.folder} has {npos} positions, the recipe {recipe.npos}; "
            f"train with npos={npos}"
        )
    if recipe.adapter_rank not in (None, rank):
        raise RequestError(
            f"the adapter {start.folder} has rank {rank}, the recipe {recipe.adapter_rank}; train "
            f"with adapter_rank={rank}, or without one to go on with all weights"
        )


def _add_adapters(model: nn.Module, rank: int, seed: int) -> None:
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise BackendError(f"adapter_rank needs peft ({error}); {install_hint('train')}") from error
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = LoraConfig(r=rank, lora_alpha=rank, target_modules=list(PROJECTIONS))
        inject_adapter_in_model(config, model)
