"""Registers our connectors with vLLM, as a plugin of the group ``vllm.general_plugins``.

vLLM loads such plugins in each of its processes, often while it is imported itself. So nothing else
is imported here, and a vLLM that registers connectors otherwise starts all the same.
"""

import importlib
import logging
import os

FACTORY = "vllm.distributed.kv_transfer.kv_connector.factory"
SETTING = "MOONCAKE_KERNELS_ENGINE_COPIES"
CONNECTORS = {  # by the name that goes into kv_connector: its module, and its class there
    "MooncakeKernelsConnector": ("mooncake_serving.connectors.vllm", "StoreConnector"),
}

log = logging.getLogger(__name__)


def register() -> None:
    """Let ``kv_connector`` of vLLM's ``--kv-transfer-config`` name our connectors, without a
    ``kv_connector_module_path``, and call ``use_copy_batch`` if MOONCAKE_KERNELS_ENGINE_COPIES
    is 1. Idempotent; never raises.
    """
    _register_connectors()
    if SETTING in os.environ:
        _use_copies()


def _use_copies() -> None:
    try:
        from mooncake_kernels import config

        if config.current().engine_copies:
            from .vllm.copies import use_copy_batch

            use_copy_batch()
    except Exception as error:  # noqa: BLE001 - vLLM does not start if a plugin raises
        log.warning("vLLM's offloading copies with its own functions: %s", error)


def _register_connectors() -> None:
    for name, (module, connector) in CONNECTORS.items():
        try:
            factory = importlib.import_module(FACTORY).KVConnectorFactory
            # It refuses a name that it has, and this runs again in forked processes.
            if name not in getattr(factory, "_registry", ()):
                factory.register_connector(name, module, connector)
        except Exception as error:  # noqa: BLE001 - vLLM does not start if a plugin raises
            log.warning(
                "vLLM cannot find %s by its name (%r): give kv_connector %s and "
                "kv_connector_module_path %s",
                name,
                error,
                connector,
                module,
            )
