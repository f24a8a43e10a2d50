"""What engines import from ``nixl``, ``nixl._api`` and ``nixl._bindings``."""

import subprocess
import sys

import pytest

from mooncake_serving.compat import nixl

API = [
    "nixl_agent",
    "nixl_agent_config",
    "nixl_backend_handle",
    "nixl_prepped_dlist_handle",
    "nixl_thread_sync_t",
    "nixl_xfer_handle",
    "nixlBind",
    "DEFAULT_COMM_PORT",
]
BINDINGS = [
    "nixlBackendError",
    "nixlCancelledError",
    "nixlRemoteDisconnectError",
    "nixlNotFoundError",
    "nixlInvalidParamError",
    "nixlMismatchError",
    "nixlNotAllowedError",
    "nixlNotPostedError",
    "nixlNotSupportedError",
    "nixlRepostActiveError",
    "nixlUnknownError",
    "nixlNoTelemetryError",
    "nixlXferTelemetry",
    "nixlXferDList",
    "nixlRegDList",
    "nixlAgent",
    "nixlAgentConfig",
    "DRAM_SEG",
    "VRAM_SEG",
    "FILE_SEG",
    "OBJ_SEG",
    "BLK_SEG",
    "NIXL_READ",
    "NIXL_WRITE",
    "NIXL_INIT_AGENT",
    "NIXL_THREAD_SYNC_STRICT",
    "NIXL_THREAD_SYNC_RW",
    "NIXL_THREAD_SYNC_NONE",
    "NIXL_THREAD_SYNC_DEFAULT",
    "DEFAULT_COMM_PORT",
    "nixl_mem_t",
    "nixl_xfer_op_t",
]


@pytest.mark.parametrize("name", API)
def test_api(name):
    assert hasattr(nixl._api, name)


@pytest.mark.parametrize("name", BINDINGS)
def test_bindings(name):
    assert hasattr(nixl._bindings, name) and hasattr(nixl._api.nixlBind, name)


def test_package():
    for name in nixl.__all__:
        assert hasattr(nixl, name)
    assert nixl.logging.get_logger("_api").name == "mooncake_serving.compat.nixl.api"


def test_agents_that_are_dropped_are_closed():
    """No warning of an engine that was not closed, no thread that keeps the process."""
    code = (
        "from mooncake_serving.compat.nixl import nixl_agent\n"
        "a, b = nixl_agent('a'), nixl_agent('b')\n"
        "a.add_remote_agent(b.get_agent_metadata())\n"
        "a.send_notif('b', b'x')\n"
        "del a\n"
    )
    command = [sys.executable, "-X", "dev", "-W", "error::ResourceWarning", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "ResourceWarning" not in done.stderr, done.stderr
