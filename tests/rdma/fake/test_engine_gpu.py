"""The engine's NICs and GPU memory: their writes are flushed before they are reported."""

import numpy as np
import pytest

from mooncake_kernels.errors import TransferError
from mooncake_kernels.transfer import TransferEngine

from .engines import ALL, topology_of
from .pairs import addressed

SIZE = 1 << 16


@pytest.fixture
def pair(gpu):
    with (
        TransferEngine(transports=["rdma"], topology=topology_of(ALL[:2])) as near,
        TransferEngine(transports=["rdma"], topology=topology_of(ALL[2:])) as far,
    ):
        here, there = gpu.allocate(SIZE), gpu.allocate(SIZE, device=1)
        here.bytes[:], there.bytes[:] = addressed(SIZE), addressed(SIZE, 1)
        regions = near.register(here), far.register(there)
        assert [region.location for region in regions] == ["cuda:0", "cuda:1"]
        with near.open(far.name) as peer:
            yield near, far, peer, here, there


def test_notification_waits_for_the_gpu_flush(gpu, pair):
    near, far, peer, here, there = pair
    row = [(here.address, there.address, SIZE)]
    near.write(peer, row).wait()
    assert gpu.get("num_flushes") == 0
    near.write(peer, row, notify=b"done").wait()
    assert gpu.get("num_flushes") == 1
    assert far.receive_notifications(5) == [(near.name, b"done")]
    np.testing.assert_array_equal(there.bytes, addressed(SIZE))


def test_read_into_gpu_is_flushed_locally(gpu, pair):
    near, _, peer, here, there = pair
    near.read(peer, [(here.address, there.address, SIZE)]).wait()
    assert gpu.get("num_flushes") == 1
    np.testing.assert_array_equal(here.bytes, addressed(SIZE, 1))


def test_no_notification_without_a_possible_flush(gpu, pair):
    near, far, peer, here, there = pair
    gpu.set(flush_options=0)
    with pytest.raises(TransferError, match="neither orders the writes of NICs"):
        near.write(peer, [(here.address, there.address, SIZE)], notify=b"done").wait()
    assert far.receive_notifications() == []
    with pytest.raises(TransferError, match="neither orders the writes of NICs"):
        near.read(peer, [(here.address, there.address, SIZE)]).wait()


def test_gpu_with_ordered_writes_is_not_flushed(gpu, pair):
    near, _, peer, here, there = pair
    gpu.set(writes_ordering=200)
    near.write(peer, [(here.address, there.address, SIZE)], notify=b"done").wait()
    assert gpu.get("num_flushes") == 0
