"""Parts of the transfer engine alone, in C++."""

from pathlib import Path

import pytest

from ..cxx import build, run

HERE = Path(__file__).parent
PARTS = {  # each test_*.cc, and the files of csrc/transfer that it is linked with
    "counters": "request/counters peer/stats",
    "file_op": "file/file_op request/piece",
    "gate": "net/admission net/links base/limit wire/reject_reason",
    "liveness": "shm/liveness ../common/process_id",
    "openssl": "",
    "peer_identity": "net/lost_links net/peer_identity",
    "region_table": "memory/control_page memory/region_table base/limit ../common/shared_memory",
    "request": """
        request/block_pool request/coalesce request/delivered request/integers request/overlap
        request/piece
    """,
    "rpc_client": """
        peer/rpc_client channel/channel net/connection_pool request/counters base/error base/limit
        ../common/process_id
    """,
    "slicer": "rdma/slicer request/piece",
    "zero_copy": """
        base/error base/limit base/uring wire/reject_reason net/address net/frame_macs
        net/local_users net/secret net/socket net/stream net/tls net/zero_copy ../common/fault_guard
    """,
}


@pytest.mark.parametrize("part", PARTS)
def test_part_alone(part, tmp_path):
    if part == "openssl" and not Path("/usr/include/openssl/ssl.h").is_file():
        pytest.skip("there is no openssl/ssl.h in /usr/include")
    sources = [f"transfer/{name}.cc" for name in PARTS[part].split()]
    flags = ["-g1", "-pthread", "-ldl"]  # instead of -g: it compiles in less time
    result = run(build(HERE / f"test_{part}.cc", sources, tmp_path, *flags))
    assert result.returncode == 0, result.stderr
    if part == "zero_copy" and (reason := result.stdout.strip()):
        pytest.skip(reason)
