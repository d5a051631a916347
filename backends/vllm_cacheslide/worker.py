"""The worker class: vLLM's own, which also hands its model to the connector and answers for it.

In: `worker_cls="vllm_cacheslide.worker.CacheSlideWorker"`. Out: methods for `collective_rpc`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.platforms import current_platform

from cacheslide_agents.errors import StoreError
from vllm_cacheslide.connector import CacheSlideConnector
from vllm_cacheslide.guard import log
from vllm_cacheslide.working import Working

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as _Worker
else:
    from vllm.v1.worker.gpu_worker import Worker as _Worker


class CacheSlideWorker(_Worker):
    """Rank 0 speaks for all ranks where they say the same."""

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> Any:
        made = super().initialize_from_config(kv_cache_config)
        connector = self._connector()
        if connector is not None:
            connector.attach_model(self.model_runner.get_model())
        return made

    def cacheslide_receipt(self, request_id: str) -> dict[str, Any] | None:
        """As plain values; see `Receipt.from_dict`."""
        working = self._working()
        receipt = working.receipts.of(request_id) if working else None
        return receipt.to_dict() if receipt is not None else None

    def cacheslide_metrics(self) -> Mapping[str, float]:
        working = self._working()
        return {**working.store.metrics(), **working.receipts.totals()} if working else {}

    def cacheslide_flush(self) -> None:
        """Write what is not on SSD yet; trouble is only logged. Shutting down may be cut short."""
        working = self._working()
        try:
            if working:
                working.store.flush()
        except StoreError as error:
            log.warning("CacheSlide: %s", error)

    def cacheslide_off(self) -> str:
        """Why there is no reuse; empty when there is."""
        connector = self._connector()
        return connector.off if connector is not None else "the connector is not configured"

    def cacheslide_pin(self, session: str, namespace: str, pinned: bool) -> None:
        working = self._working()
        if working:
            (working.store.pin if pinned else working.store.unpin)(session, namespace)

    def _connector(self) -> CacheSlideConnector | None:
        group = get_kv_transfer_group() if has_kv_transfer_group() else None
        return group if isinstance(group, CacheSlideConnector) else None

    def _working(self) -> Working | None:
        connector = self._connector()
        return connector.working if connector is not None else None
