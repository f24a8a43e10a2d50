"""Mooncake's calls with its protocol "rdma", over the fake NICs."""

import contextlib
import errno

import numpy as np
import pytest

from mooncake_kernels.topology import Topology
from mooncake_serving.compat.mooncake import TransferEngine, TransferNotify, TransferOpcode, names

from ...compat.support import refused
from .engines import UNTOUCHED, topology_of
from .pairs import addressed

SIZE, BLOCK = 1 << 20, 4096
COUNT = SIZE // BLOCK


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """One whose NICs are found, and whose engines do not meet in memory."""
    monkeypatch.delenv("MC_FORCE_TCP", raising=False)
    monkeypatch.setattr(Topology, "discover", lambda: topology_of())
    assert "rdma" in names.transports_of("rdma") and "tcp" not in names.transports_of("rdma")
    monkeypatch.setitem(names._TRANSPORTS, "rdma", ("rdma",))


@contextlib.contextmanager
def started(device_name: str):
    with contextlib.closing(TransferEngine()) as engine:
        assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "rdma", device_name) == 0
        yield engine


@pytest.mark.parametrize(
    ("devices", "used"),
    [("", {"fake0", "fake1", "fake2", "fake3"}), ("fake2, fake0", {"fake0", "fake2"})],
)
def test_transfers_use_only_the_named_nics(devices, used):
    near, far = addressed(SIZE), np.full(SIZE, UNTOUCHED, np.uint8)
    with started(devices) as here, started("") as there:
        peer = f"127.0.0.1:{there.get_rpc_port()}"
        assert here.register_memory(near.ctypes.data, SIZE) == 0
        assert there.register_memory(far.ctypes.data, SIZE) == 0
        offsets = np.arange(COUNT) * BLOCK
        blocks = near.ctypes.data + offsets, far.ctypes.data + offsets[::-1], [BLOCK] * COUNT
        notify = TransferNotify("request 7", "is there")
        assert here.batch_transfer_sync(peer, *blocks, TransferOpcode.Write, notify) == 0
        expected = addressed(SIZE).reshape(COUNT, BLOCK)[::-1].reshape(-1)
        np.testing.assert_array_equal(far, expected)
        assert there.get_notifies() == [notify]
        assert here.transfer_sync_read(peer, near.ctypes.data, far.ctypes.data, SIZE) == 0
        np.testing.assert_array_equal(near, expected)
        paths = here.get_engine().stats()["paths"][peer]
        moved = {name: path["num_bytes_read"] for name, path in paths.items()}
        assert moved.pop("connection") == 0
        assert set(moved) == used and sum(moved.values()) == SIZE
        here.close()  # whoever asks for the engine beneath owns it


def test_unknown_nic_name_fails_initialize(caplog):
    with contextlib.closing(TransferEngine()) as engine:
        arguments = ("127.0.0.1", "P2PHANDSHAKE", "rdma", "fake0,mlx5_0")
        reason = r"of which it has \['fake0', .* got 'fake0,mlx5_0'"
        refused(caplog, -1, reason, engine.initialize, *arguments)


def test_partially_registered_batch_is_rolled_back(world, caplog):
    memory = addressed(SIZE)
    begins = [memory.ctypes.data + i * BLOCK for i in range(4)]
    with started("fake0") as engine:
        world.fail("ibv_reg_mr_iova2", errno.ENOMEM, skip=2)
        register = engine.batch_register_memory
        refused(caplog, -1, "Cannot allocate memory", register, begins, [BLOCK] * 4)
        assert register(begins, [BLOCK] * 4) == 0  # none was left


def test_memory_of_gpus_in_a_stream(gpu):
    """No GPU copies it: NICs do. A read is flushed before its stream goes on."""
    with started("") as here, started("") as there:
        peer = f"127.0.0.1:{there.get_rpc_port()}"
        near, far = gpu.allocate(SIZE), gpu.allocate(SIZE, device=1)
        # By objects, because the host reaches this memory, too, so that its addresses do not tell.
        regions = here.get_engine().register(near), there.get_engine().register(far)
        assert [region.location for region in regions] == ["cuda:0", "cuda:1"]
        near.bytes[:] = addressed(SIZE)
        here.transfer_write_on_cuda(peer, near.address, far.address, SIZE, stream_ptr=4711)
        assert not far.bytes.any()
        gpu.arrive()
        np.testing.assert_array_equal(far.bytes, addressed(SIZE))
        near.bytes[:] = 0
        offsets = np.arange(COUNT) * BLOCK
        blocks = near.address + offsets, far.address + offsets[::-1], [BLOCK] * COUNT
        before = gpu.get("num_flushes")
        here.batch_transfer_read_on_cuda(peer, *blocks, stream_ptr=4711)
        gpu.arrive()
        assert here.check_transfers_on_cuda() == 0
        assert gpu.get("num_flushes") == before + 1
        expected = addressed(SIZE).reshape(COUNT, BLOCK)[::-1].reshape(-1)
        np.testing.assert_array_equal(near.bytes, expected)
