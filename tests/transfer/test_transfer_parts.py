"""Parts of the transfer engine alone, in C++."""

from pathlib import Path

import pytest

from ..cxx import build, run

HERE = Path(__file__).parent
GATE = ["net/admission", "net/links", "base/limit", "wire/reject_reason"]
RPC = [
    "peer/rpc_client",
    "channel/channel",
    "net/connection_pool",
    "request/counters",
    "base/error",
    "base/limit",
]
REGIONS = ["memory/control_page", "memory/region_table", "base/limit"]
SOCKET = ["base/error", "base/limit", "base/uring", "wire/reject_reason"]
SOCKET += [f"net/{name}" for name in ("address", "frame_macs", "local_users", "secret", "socket")]
SOCKET += [f"net/{name}" for name in ("stream", "tls", "zero_copy")]
REQUEST = ("block_pool", "coalesce", "delivered", "integers", "overlap", "piece")


def test_gate(tmp_path):
    sources = [f"transfer/{name}.cc" for name in GATE]
    result = run(build(HERE / "test_gate.cc", sources, tmp_path, "-pthread"))
    assert result.returncode == 0, result.stderr


def test_request(tmp_path):
    sources = [f"transfer/request/{name}.cc" for name in REQUEST]
    result = run(build(HERE / "test_request.cc", sources, tmp_path))
    assert result.returncode == 0, result.stderr


def test_counters(tmp_path):
    sources = ["transfer/request/counters.cc", "transfer/peer/stats.cc"]
    result = run(build(HERE / "test_counters.cc", sources, tmp_path, "-pthread"))
    assert result.returncode == 0, result.stderr


def test_peer_identity(tmp_path):
    sources = [f"transfer/{name}.cc" for name in ("net/lost_links", "net/peer_identity")]
    result = run(build(HERE / "test_peer_identity.cc", sources, tmp_path))
    assert result.returncode == 0, result.stderr


def test_rpc_client(tmp_path):
    sources = [f"transfer/{name}.cc" for name in RPC] + ["common/process_id.cc"]
    result = run(build(HERE / "test_rpc_client.cc", sources, tmp_path, "-pthread"))
    assert result.returncode == 0, result.stderr


def test_region_table(tmp_path):
    sources = [f"transfer/{name}.cc" for name in REGIONS] + ["common/shared_memory.cc"]
    result = run(build(HERE / "test_region_table.cc", sources, tmp_path, "-pthread"))
    assert result.returncode == 0, result.stderr


def test_zero_copy(tmp_path):
    sources = [*(f"transfer/{name}.cc" for name in SOCKET), "common/fault_guard.cc"]
    result = run(build(HERE / "test_zero_copy.cc", sources, tmp_path, "-pthread", "-ldl"))
    assert result.returncode == 0, result.stderr
    if reason := result.stdout.strip():
        pytest.skip(reason)


def test_file_op(tmp_path):
    sources = [f"transfer/{name}.cc" for name in ("file/file_op", "request/piece")]
    result = run(build(HERE / "test_file_op.cc", sources, tmp_path))
    assert result.returncode == 0, result.stderr


def test_slicer(tmp_path):
    sources = [f"transfer/{name}.cc" for name in ("rdma/slicer", "request/piece")]
    result = run(build(HERE / "test_slicer.cc", sources, tmp_path))
    assert result.returncode == 0, result.stderr


def test_openssl_declarations_match_the_headers(tmp_path):
    if not Path("/usr/include/openssl/ssl.h").is_file():
        pytest.skip("there is no openssl/ssl.h in /usr/include")
    result = run(build(HERE / "test_openssl.cc", [], tmp_path, "-ldl"))
    assert result.returncode == 0, result.stderr


def test_liveness(tmp_path):
    sources = ["transfer/shm/liveness.cc", "common/process_id.cc"]
    result = run(build(HERE / "test_liveness.cc", sources, tmp_path, "-pthread"))
    assert result.returncode == 0, result.stderr
