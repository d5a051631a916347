"""vLLM's KV connector: the hooks that vLLM calls, handed on to the side they belong to.

In: vLLM's calls, one instance in the scheduler's process and one in each worker's. Out: answers
that never raise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
)

from cacheslide_agents.errors import StoreError
from cacheslide_agents.policies.cost import CostModel
from vllm_cacheslide.agreement import agreed
from vllm_cacheslide.assembly import assemble
from vllm_cacheslide.cope.profiles import open_profiles
from vllm_cacheslide.guard import guarded, log
from vllm_cacheslide.identity import fingerprint
from vllm_cacheslide.metrics import PrometheusMetrics, Stats
from vllm_cacheslide.orders import StepOrders, StepResults
from vllm_cacheslide.planning import Planning
from vllm_cacheslide.restoring import Found, held_by_all
from vllm_cacheslide.scheduling import Scheduling
from vllm_cacheslide.settings import Settings
from vllm_cacheslide.stamp import stamp_of_server
from vllm_cacheslide.support import version_note, why_not
from vllm_cacheslide.working import Working

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class CacheSlideConnector(KVConnectorBase_V1):
    """Cross-position reuse of keys and values for annotated requests; others are untouched."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self.settings = Settings.of(extra)
        self.off = why_not(vllm_config)
        if len(kv_cache_config.kv_cache_groups) != 1 and not self.off:
            self.off = "not supported with several groups of KV cache layers"
        self.working: Working | None = None
        self._unfilled: set[int] = set()
        self._to_free: set[str] = set()
        self._promised: set[int] = set()
        if role is KVConnectorRole.SCHEDULER:
            cost = CostModel.from_config(vllm_config.model_config.hf_text_config)
            self.scheduling = Scheduling(
                Planning(
                    cost,
                    fingerprint(vllm_config),
                    self.off,
                    self.settings.one_per_session,
                    open_profiles(vllm_config.model_config.model, self.settings.profiles),
                ),
                vllm_config.scheduler_config.max_num_batched_tokens,
                stamp_of_server(),
            )
            log.info("CacheSlide is %s", f"off: {self.off}" if self.off else "on")
            if note := version_note():
                log.warning("CacheSlide: %s", note)

    @property
    def requires_kv_delivery(self) -> bool:
        """What is not stored is only a miss of the next turn."""
        return False

    # The worker's side.

    def attach_model(self, model: torch.nn.Module) -> None:
        """Called by our worker class when model and KV cache are there, on all ranks.

        `StoreError`, which ends the engine's start, when the store's folder cannot be had: another
        engine writes to it, say. Whatever else is wrong only switches reuse off, on every rank.
        """
        if self.off:
            return
        refused: StoreError | None = None
        try:
            self.working = assemble(model, self._vllm_config, self._kv_cache_config, self.settings)
        except Exception as error:
            self.off = f"{type(error).__name__}: {error}"
            refused = error if isinstance(error, StoreError) else None
        (self.off,) = agreed([self.off])
        if refused is not None:
            raise refused
        if self.off:
            log.warning("CacheSlide is off: %s", self.off)
            self.shutdown()
            self.working = None

    @guarded(lambda: None)
    def get_handshake_metadata(self) -> Found | None:
        """What this rank's store has from before."""
        return self.working.restored.found() if self.working is not None else None

    @guarded(lambda: None)
    def start_load_kv(self, forward_context: ForwardContext, **_: Any) -> None:
        orders = self._connector_metadata
        if not isinstance(orders, StepOrders):
            return
        self._to_free.update(keep.order.engine_id for keep in orders.keeps)
        blocks = orders.blocks
        self._unfilled |= blocks | orders.unfilled
        if self.working is not None:
            with torch.inference_mode():
                unfilled = self.working.carry_out(orders)
            self._unfilled -= blocks - unfilled

    @guarded(lambda: None)
    def wait_for_layer_load(self, layer_name: str) -> None:
        """Everything is in place before the forward pass starts."""

    @guarded(lambda: None)
    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **_: Any) -> None:
        """Whole requests are stored when they end."""

    @guarded(lambda: None)
    def wait_for_save(self) -> None:
        """Storing is finished when `start_load_kv` returns."""

    @guarded(lambda: (None, None))
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        done, self._to_free = self._to_free, set()
        return done or None, None

    @guarded(set)
    def get_block_ids_with_load_errors(self) -> set[int]:
        unfilled, self._unfilled = self._unfilled, set()
        return unfilled

    @guarded(lambda: None)
    def build_connector_worker_meta(self) -> StepResults | None:
        if self.working is None:
            return StepResults(off=self.off) if self.off else None
        return self.working.take_results()

    @guarded(lambda: None)
    def get_kv_connector_stats(self) -> Stats | None:
        """vLLM adds up all ranks."""
        news = self.working.take_news() if self.working is not None else None
        return Stats(news) if news else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Stats:
        return Stats(data or {})

    @classmethod
    def build_prom_metrics(cls, *given: Any, **named: Any) -> PrometheusMetrics:
        return PrometheusMetrics(*given, **named)

    @guarded(lambda: None)
    def shutdown(self) -> None:
        if self.working is not None:
            self.working.store.close()

    # The scheduler's side.

    @guarded(lambda: None)
    def set_xfer_handshake_metadata(
        self, metadata: Mapping[int, KVConnectorHandshakeMetadata]
    ) -> None:
        """Of every rank, before the first request comes."""
        found = [each for _, each in sorted(metadata.items()) if isinstance(each, Found)]
        ranks = self._vllm_config.parallel_config.tensor_parallel_size
        self.scheduling.restore(held_by_all(found, ranks))

    @guarded(lambda: None)
    def on_new_request(self, request: Request) -> None:
        self.scheduling.arrived(request)

    @guarded(lambda: (0, False))
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self.scheduling.matched(request, num_computed_tokens), False

    @guarded(lambda: None)
    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        ids = blocks.get_block_ids()[0]
        if num_external_tokens:
            self._promised.update(ids)
        self.scheduling.admitted(request, ids, num_external_tokens)

    @guarded(StepOrders)
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        orders = self.scheduling.take_orders()
        promised, self._promised = self._promised, set()
        return replace(orders, unfilled=frozenset(promised - orders.blocks))

    @guarded(lambda: None)
    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        results = connector_output.kv_connector_worker_meta
        if isinstance(results, StepResults):
            self.scheduling.learn(results)

    @guarded(lambda: (False, None))
    def request_finished(
        self, request: Request, block_ids: Sequence[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        manager = self._kv_cache_manager
        size = self._vllm_config.cache_config.block_size
        forgotten = self.scheduling.not_to_retain(request, block_ids, size)
        if forgotten and manager is not None:
            manager.evict_blocks(forgotten)
        return self.scheduling.finished(request, block_ids), None
