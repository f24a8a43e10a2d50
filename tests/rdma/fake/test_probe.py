"""probe(): whether a NIC really reaches memory."""

import errno

import numpy as np
import pytest

from mooncake_kernels import InvalidArgument, Unavailable, rdma

from .gpu import MIB
from .pairs import addressed


@pytest.mark.parametrize("size", [1, 100, 4096, 100_000])
def test_probe_leaves_memory_unchanged(world, device, size):
    memory = addressed(size)
    before = memory.copy()
    assert rdma.probe(device, memory) == ""
    np.testing.assert_array_equal(memory, before)
    assert world.live() == {"context": 1, "protection domain": 1}


def test_memory_of_a_gpu(world, gpu, device):
    memory = gpu.allocate(MIB)
    memory.bytes[:] = 7
    assert rdma.probe(device, memory) == ""
    assert (memory.bytes == 7).all()
    gpu.set(dmabuf_supported=0)
    with pytest.raises(Unavailable, match="register: 1048576 bytes of cuda:0 cannot be"):
        rdma.probe(device, memory)


def test_probe_raises_when_registration_fails(world, device):
    world.fail("ibv_reg_mr_iova2", errno.EFAULT)
    with pytest.raises(OSError, match="ibv_reg_mr: 10 bytes"):
        rdma.probe(device, bytearray(10))
    assert world.live() == {"context": 1, "protection domain": 1}


@pytest.mark.parametrize(
    ("skip", "message"),
    [
        (0, "registered, but read failed: transfer with queue pair 17: remote access error"),
        (1, "registered, but write failed: "),
        (2, "registered, but read failed: "),
        (3, "registered, but write failed: "),
    ],
)
def test_probe_reports_unreachable_memory(world, device, skip, message):
    world.fail_work("remote access error", skip)
    assert rdma.probe(device, bytearray(10)).startswith(message)
    assert world.live() == {"context": 1, "protection domain": 1}


def test_probe_reports_corrupted_data(world, device):
    world.set_option("corrupt", 1)
    reason = rdma.probe(device, bytearray(10))
    assert reason == "registered, but what was read back is not what was written"


def test_probe_times_out_without_completions(world, device):
    with world.held():
        reason = rdma.probe(device, bytearray(10), timeout_s=0.05)
    assert reason.startswith("registered, but read failed: wait: transfer 1 is not over")


def test_probe_requires_an_active_port(world, device):
    world.set_port(state="DOWN")
    with pytest.raises(Unavailable, match="probe: port 1 of fake0 must be ACTIVE, got DOWN"):
        rdma.probe(device, bytearray(10))


@pytest.mark.parametrize("memory", [b"read-only", bytearray()])
def test_probe_requires_writable_nonempty_memory(device, memory):
    with pytest.raises(InvalidArgument, match="probe: buffer must be writable and hold at least"):
        rdma.probe(device, memory)


def test_probe_on_another_port(world):
    world.add_port()
    world.set_port(port=1, state="DOWN")
    with rdma.open("fake0") as device:
        assert rdma.probe(device, bytearray(10), port=2) == ""
