"""The Python API of NIXL (PyPI: nixl) on our transfer engine.

Callers of ``nixl`` change the import, and nothing else::

    from mooncake_serving.compat.nixl import nixl_agent, nixl_agent_config

    agent = nixl_agent("decode", nixl_agent_config(backends=["UCX"]))
    agent.register_memory(cache)
    agent.add_remote_agent(metadata_of_prefill)

``_api``, ``_bindings`` and ``logging`` stand in for NIXL's modules of these names. Both ends must
use this library. docs/serving/nixl.md has the table of all calls and every difference.
"""

from . import _api, _bindings, logging
from ._api import (
    DEFAULT_COMM_PORT,
    nixl_agent,
    nixl_agent_config,
    nixl_backend_handle,
    nixl_prepped_dlist_handle,
    nixl_thread_sync_t,
    nixl_xfer_handle,
)
from ._bindings import nixlRegDList, nixlXferDList, nixlXferTelemetry

__all__ = [
    "DEFAULT_COMM_PORT",
    "_api",
    "_bindings",
    "logging",
    "nixlRegDList",
    "nixlXferDList",
    "nixlXferTelemetry",
    "nixl_agent",
    "nixl_agent_config",
    "nixl_backend_handle",
    "nixl_prepped_dlist_handle",
    "nixl_thread_sync_t",
    "nixl_xfer_handle",
]
