"""vLLM's plugin hook: makes the connector known by name.

In: vLLM's call, in every one of its processes and maybe more than once. Out: a registered name.
"""

from __future__ import annotations

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

CONNECTOR = "CacheSlideConnector"
PLUGIN = "cacheslide"
"""Our entry points' name in vLLM's plugin groups, for `VLLM_PLUGINS`."""


def register() -> None:
    """Entry point of group `vllm.general_plugins`."""
    try:
        KVConnectorFactory.get_connector_class_by_name(CONNECTOR)
    except ValueError:
        KVConnectorFactory.register_connector(
            CONNECTOR, "vllm_cacheslide.connector", "CacheSlideConnector"
        )
