"""The store as vLLM's external KV cache: a ``KVConnectorBase_V1``.

::

    vllm serve MODEL --kv-transfer-config '{
        "kv_connector": "StoreConnector",
        "kv_connector_module_path": "mooncake_serving.connectors.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"url": "shm:/dev/shm/kv?size=64GiB"}}'

All engines that use the same store share everything that any of them has computed.
docs/serving/vllm.md describes how, and the limitations. Only the connector itself imports vLLM.
"""

from typing import TYPE_CHECKING, Any

from mooncake_kernels.errors import Unavailable

if TYPE_CHECKING:
    from .connector import StoreConnector

__all__ = ["StoreConnector"]


def __getattr__(name: str) -> Any:
    if name != "StoreConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from .connector import StoreConnector
    except ModuleNotFoundError as missing:
        if not (missing.name or "").startswith("vllm"):
            raise
        raise Unavailable(f"StoreConnector: vLLM must be installed: {missing}") from None
    return StoreConnector
