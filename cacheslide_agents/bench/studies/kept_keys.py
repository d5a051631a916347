"""Keys of a prompt as a dense run computes them, read back from a backend's store.

In: a backend whose store can be read, a prompt, token ranges of it. Out: position-free keys of
every layer. Besides, the converted model that some studies set beside the stock one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor

from cacheslide_agents.backend import Backend, GenerationRequest, load_backend
from cacheslide_agents.bench.studies.oracle import KeepsContexts
from cacheslide_agents.chunks import EncodedPrompt
from cacheslide_agents.errors import BackendError, DataError, RequestError
from cacheslide_agents.pages.base import ContextKey, TokenRange
from cacheslide_agents.policies import Policy, Prefix
from cacheslide_agents.position.contextual import Contextual


def kept_keys(
    backend: Backend,
    prompt: EncodedPrompt,
    ranges: Sequence[TokenRange],
    policy: Policy | None = None,
) -> list[Tensor]:
    """[kv_heads, tokens, head_dim] float32 of each layer, after a first prefill under `policy`.

    What the store held before is gone afterwards.
    """
    if not isinstance(backend, KeepsContexts):
        raise BackendError(f"this study reads stored keys, which {backend.model_id} keeps away")
    namespace = f"study-{uuid4().hex}"
    backend.warm(GenerationRequest.of(prompt, namespace=namespace, policy=policy or Prefix()))
    key = ContextKey(backend.fingerprint, namespace, prompt.task)
    context = next(iter(backend.store.find(key)), None)
    if context is None:
        raise BackendError("the store does not hold the prompt; raise its byte budget")
    layers = [
        backend.store.load(context, layer, ranges)[0].float().cpu().clone()
        for layer in range(backend.layers)
    ]
    backend.store.clear()
    return layers


def ck_sim(one: Tensor, other: Tensor) -> Tensor:
    """CKSim [tokens]: cosine of keys [kv_heads, tokens, head_dim], mean over heads."""
    return torch.cosine_similarity(one, other, dim=-1).mean(dim=0)


@contextmanager
def converted(backend: Backend, model: str) -> Iterator[Backend]:
    """The CoPE model `model`, on the device and in the precision of `backend`.

    `RequestError` if it is none; `DataError` if its tokenizer is another, so that ids would mean
    something else.
    """
    options: dict[str, Any] = {"model": model}
    for name in ("device", "dtype"):
        if (value := getattr(backend, name, None)) is not None:
            options[name] = str(value) if name == "device" else value
    loaded = load_backend("torch", **options)
    try:
        if not isinstance(getattr(loaded, "position", None), Contextual):
            raise RequestError(f"--cope-model {model}: its positions are not contextual (CoPE)")
        if loaded.tokenizer.get_vocab() != backend.tokenizer.get_vocab():
            raise DataError(f"{loaded.model_id} and {backend.model_id} have different tokenizers")
        yield loaded
    finally:
        loaded.close()
