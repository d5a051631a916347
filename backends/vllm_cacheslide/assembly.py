"""Puts one rank's parts together, and proves that they fit this engine.

In: the loaded model, vLLM's config, our settings. Out: a `Working` side, or an
`UnsupportedModelError` that says why this engine cannot reuse.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from cacheslide_agents.pages.store import MemoryStore
from cacheslide_agents.position.rotary import Rotary
from vllm_cacheslide.attention import Masked, RowAttention, Runs
from vllm_cacheslide.decoder import Decoder
from vllm_cacheslide.keeping import Keeping
from vllm_cacheslide.paging import PagedCache
from vllm_cacheslide.passes import LayerPass
from vllm_cacheslide.prefill import SelectivePrefill
from vllm_cacheslide.receipts import Receipts
from vllm_cacheslide.settings import Settings
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
    """Call it when the KV cache is allocated and no request has come yet."""
    decoder = Decoder(model)
    rotary = Rotary.from_config(config.model_config.hf_text_config)
    decoder.check_rotary(rotary)
    spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
    paged = PagedCache(decoder.attentions, spec.block_size)
    with torch.inference_mode():
        paged.check()
    most_rows = config.scheduler_config.max_num_batched_tokens
    runs = Runs(config, decoder.attentions, spec, paged, most_rows)
    masked = settings.attention == "masked"
    attention: RowAttention = Masked(runs, decoder.attentions, paged) if masked else runs
    store = MemoryStore(settings.store_bytes)
    return Working(
        store,
        SelectivePrefill(LayerPass(decoder, paged, attention), rotary, most_rows),
        Keeping(store, rotary, paged, decoder.layers),
        Receipts(settings.receipts),
        decoder.layers,
    )
