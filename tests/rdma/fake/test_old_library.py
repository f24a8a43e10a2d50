"""Versions of libibverbs that lack newer functions, each in a separate process."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]

COMMON = """
import sys
sys.path.append(sys.argv[1])
from tests.rdma.fake.world import World
world = World("-DFAKE_OLD")
from tests.rdma.fake.gpu import MIB, Driver
driver = Driver()
driver.reset(0)
from mooncake_kernels import Unavailable, rdma
from tests.rdma.fake.pairs import Connection
"""
WITHOUT_IOVA2 = """
with rdma.open("fake0") as device, device.register(bytearray(100), "remote_write") as region:
    assert region.num_bytes == 100
[call] = world.log("ibv_reg_mr")
assert call["verb"] == "ibv_reg_mr" and call["access"] == 3, call
"""
WITHOUT_GID_TYPES = """
[port] = rdma.devices()[0].ports
assert [gid.type for gid in port.gids] == ["", ""] and port.active_mtu == 1024
with Connection(world) as c:
    assert c.near.pair.endpoint.gid_type == ""
    assert rdma.Endpoint.from_bytes(c.near.pair.endpoint.to_bytes()) == c.near.pair.endpoint
    c.near.queue.wait(c.write([(0, 0, 100)]))
    c.expect(False, [(0, 0, 100)])
    c.check_bytes()
"""
WITHOUT_DMABUF = """
memory = driver.allocate(MIB)
with rdma.open("fake0") as device:
    try:
        device.register(memory)
    except Unavailable as error:
        assert "By dma-buf: ibv_reg_dmabuf_mr: " in str(error), error
        assert "undefined symbol: ibv_reg_dmabuf_mr. By nvidia_peermem: Bad address" in str(error)
    else:
        raise AssertionError("registered")
    world.set_option("peermem", 1)
    with device.register(memory) as region:
        assert region.mapping == "peermem" and "undefined symbol" in region.note
    try:
        device.register(memory, mapping="dmabuf")
    except Unavailable as error:
        assert "By nvidia_peermem: not tried" in str(error)
    else:
        raise AssertionError("registered")
assert driver.get("num_exports_tried") == 0
"""
CHECK = "\nworld.check()\n"
WITHOUT_LIBRARY = """
from mooncake_kernels import TransferEngine, Unavailable, rdma
assert rdma.devices() == []
for call in (lambda: rdma.open("fake0"), lambda: TransferEngine(transports=["rdma"])):
    try:
        call()
    except Unavailable as error:
        assert "libibverbs.so.1" in str(error), error
    else:
        raise AssertionError("no error")
with TransferEngine():
    pass
"""


def run(script: str, **variables: str) -> None:
    command = [sys.executable, "-c", script, str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | variables)
    assert done.returncode == 0, done.stderr


def test_without_iova2_relaxed_ordering_is_left_out():
    run(COMMON + WITHOUT_IOVA2 + CHECK)


def test_library_without_gid_types():
    run(COMMON + WITHOUT_GID_TYPES + CHECK)


def test_library_without_dmabuf(gpu):
    run(COMMON + WITHOUT_DMABUF + CHECK)


def test_missing_library_is_reported(tmp_path):
    (tmp_path / "libibverbs.so.1").write_text("not a library")
    run(WITHOUT_LIBRARY, LD_LIBRARY_PATH=str(tmp_path))
