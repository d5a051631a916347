"""vLLM's plugin hook: makes the connector and the CoPE architecture known by name.

In: vLLM's call, in every one of its processes and maybe more than once. Out: registered names.
"""

from __future__ import annotations

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.model_executor.models.registry import ModelRegistry

from vllm_cacheslide.cope.config import register_config

CONNECTOR = "CacheSlideConnector"
COPE_ARCHITECTURE = "CopeLlamaForCausalLM"
"""What a converted checkpoint names in its `architectures`."""
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
    register_config()
    if COPE_ARCHITECTURE not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(
            COPE_ARCHITECTURE, f"vllm_cacheslide.cope.model:{COPE_ARCHITECTURE}"
        )
