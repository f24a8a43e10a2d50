"""``nixl._api``: the names that engines import from it."""

from . import _bindings as nixlBind  # noqa: N812
from .agent import nixl_agent, nixl_agent_config, nixl_backend_handle
from .core import DEFAULT_COMM_PORT, nixl_thread_sync_t
from .transfers import nixl_prepped_dlist_handle, nixl_xfer_handle

__all__ = [
    "DEFAULT_COMM_PORT",
    "nixlBind",
    "nixl_agent",
    "nixl_agent_config",
    "nixl_backend_handle",
    "nixl_prepped_dlist_handle",
    "nixl_thread_sync_t",
    "nixl_xfer_handle",
]
