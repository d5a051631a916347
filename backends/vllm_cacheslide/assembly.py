"""Puts one rank's parts together, and proves that they fit this engine.

In: the loaded model, vLLM's config, our settings. Out: a `Working` side, or an
`UnsupportedModelError` that says why this engine cannot reuse.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from vllm.distributed import get_tensor_model_parallel_rank

from cacheslide_agents.errors import UnsupportedModelError
from cacheslide_agents.position.contextual import Contextual
from cacheslide_agents.position.rotary import Rotary
from vllm_cacheslide.attention import RowAttention, Runs
from vllm_cacheslide.cope.runs import CopeRuns
from vllm_cacheslide.decoder import Decoder
from vllm_cacheslide.identity import fingerprint
from vllm_cacheslide.keeping import Keeping
from vllm_cacheslide.masked import FusedAttention, Masked, SdpaAttention
from vllm_cacheslide.paging import PagedCache
from vllm_cacheslide.passes import LayerPass
from vllm_cacheslide.prefill import SelectivePrefill
from vllm_cacheslide.receipts import Receipts
from vllm_cacheslide.restoring import Restored
from vllm_cacheslide.settings import AttentionKind, Settings
from vllm_cacheslide.storage import Rank, open_store
from vllm_cacheslide.support import position_of
from vllm_cacheslide.working import Working

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


def assemble(
    model: torch.nn.Module,
    config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    settings: Settings,
) -> Working:
    """Call it when the KV cache is allocated and no request has come yet.

    The page store is opened last: `StoreError` then means that this folder cannot be had, or that
    its contexts could not be told from another model's.
    """
    decoder = Decoder(model)
    position = position_of(config.model_config.hf_text_config)
    if isinstance(position, Rotary):
        decoder.check_rotary(position)
    spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
    paged = PagedCache(decoder.attentions, spec.block_size)
    with torch.inference_mode():
        paged.check()
    most_rows = config.scheduler_config.max_num_batched_tokens
    of_position = CopeRuns if isinstance(position, Contextual) else Runs
    runs = of_position(config, decoder.attentions, spec, paged, most_rows)
    attention = _attention(settings.attention, runs, decoder, paged)
    layers = LayerPass(decoder, paged, attention, settings.prefetch)
    rank = Rank.of(config, get_tensor_model_parallel_rank())
    model_digest = fingerprint(config)
    store = open_store(settings, rank)
    return Working(
        store,
        SelectivePrefill(layers, position, most_rows),
        Keeping(store, position, paged, decoder.layers),
        Receipts(settings.receipts),
        Restored(store, rank, model_digest),
        rank,
        decoder.layers,
        ages=settings.ttl_s is not None,
    )


def _attention(
    kind: AttentionKind, runs: Runs, decoder: Decoder, paged: PagedCache
) -> RowAttention:
    if kind == "runs":
        return runs
    if isinstance(runs, CopeRuns):
        raise UnsupportedModelError(
            f"attention={kind!r}: a CoPE model has an attention of its own; use 'runs'"
        )
    own = FusedAttention(paged) if kind == "fused" else SdpaAttention(paged)
    return Masked(runs, decoder.attentions, own)
