"""GPU memory by address, through the calls of Mooncake's transfer engine."""

import contextlib
from typing import Any

import numpy as np
import pytest

from mooncake_kernels.errors import InvalidArgument
from mooncake_serving.compat.mooncake import TransferEngine, names

from ...compat.support import refused, start
from ...fake_cuda.driver import ILLEGAL_ADDRESS, OUT_OF_MEMORY
from ...fake_cuda.gpus import IS_FAKE
from ..support import UNTOUCHED, addressed, untouched
from .peers import gpu_peer

SIZE = (1 << 20) + 5
BLOCK, COUNT = 4096, 64


@pytest.fixture(autouse=True)
def _default_stream(gpus):
    """What reads and writes bytes by address is on no other stream."""
    if IS_FAKE:
        gpus.driver.set(takes_legacy=1)


@pytest.fixture
def engine(gpus):
    with contextlib.closing(start(TransferEngine())) as engine:
        yield engine


def name_of(engine: TransferEngine) -> str:
    return f"127.0.0.1:{engine.get_rpc_port()}"


def allocate(gpus, place: str) -> tuple[int, Any]:
    """Memory there: its address, and what keeps it."""
    if place.startswith("cuda"):
        memory = gpus.allocate(SIZE, int(place[-1]))
        return memory.address, memory
    array = untouched(SIZE)
    return array.ctypes.data, array


@pytest.mark.parametrize("transport", ["local", "shm", "tcp"])
@pytest.mark.parametrize(
    "places", [("cuda:0", "cuda:1"), ("cuda:1", "cpu:0"), ("cpu:0", "cuda:0")], ids="-".join
)
def test_blocks_from_and_to_gpus(gpus, monkeypatch, transport, places):
    if f"cuda:{gpus.count}" in places:
        pytest.skip("there is one GPU")
    monkeypatch.setitem(names._TRANSPORTS, "tcp", (transport,))
    (near, _near), (far, _far) = (allocate(gpus, place) for place in places)
    here, there = start(TransferEngine()), start(TransferEngine())
    with contextlib.closing(here), contextlib.closing(there):
        assert here.register_memory(near, SIZE, places[0]) == 0
        assert there.register_memory(far, SIZE, places[1]) == 0
        data = addressed(SIZE)
        assert here.write_bytes_to_buffer(near, data.tobytes(), SIZE) == 0
        assert here.read_bytes_from_buffer(near + 7, 100) == data[7:107].tobytes()
        peer = name_of(there)
        assert here.transfer_sync_write(peer, near, far, SIZE) == 0
        assert there.read_bytes_from_buffer(far, SIZE) == data.tobytes()
        offsets = np.arange(COUNT) * BLOCK
        blocks = near + offsets, far + offsets[::-1], np.full(COUNT, BLOCK)
        assert here.batch_transfer_sync_read(peer, *blocks) == 0
        whole = data[: COUNT * BLOCK]
        whole[:] = whole.reshape(COUNT, BLOCK)[::-1].reshape(-1).copy()
        assert here.read_bytes_from_buffer(near, SIZE) == data.tobytes()
        assert here.unregister_memory(near) == there.unregister_memory(far) == 0


def test_local_peer_uses_ipc_handles(engine, gpus):
    """Opened by a handle of the driver, as its own tests have it."""
    memory = gpus.allocate(SIZE)
    memory.put(addressed(SIZE))
    assert engine.register_memory(memory.address, SIZE) == 0
    with gpu_peer() as peer:
        name, there = peer.name(), peer.register(SIZE)
        assert engine.transfer_sync_write(name, memory.address, there, SIZE) == 0
        np.testing.assert_array_equal(peer.get(0), addressed(SIZE))
        paths = engine.get_engine().stats()["paths"][name]
        assert paths["cuda_ipc"]["num_bytes_written"] == SIZE
        assert engine.unregister_memory(memory.address) == 0
        engine.close()  # so that nothing of the peer's is open here when it is asked for that
        assert not any(peer.close().values())


def test_invalid_gpu_registrations_return_error(engine, gpus, caplog):
    memory = gpus.allocate(SIZE)
    register = engine.register_memory
    refused(caplog, -1, "one allocation on a GPU", register, memory.address, SIZE + (1 << 30))
    refused(caplog, -1, "memory is, cuda:0, got 'cpu:0'", register, memory.address, SIZE, "cpu:0")
    refused(caplog, -1, "memory is, cuda:0, got 'cuda:7'", register, memory.address, SIZE, "cuda:7")
    assert register(memory.address, SIZE, "cuda:0") == 0
    refused(caplog, -7, "overlap", register, memory.address + 8, 8)
    assert engine.unregister_memory(memory.address) == 0
    with pytest.raises(InvalidArgument, match="inside registered memory"):
        engine.read_bytes_from_buffer(memory.address, 8)


def test_driver_failures_return_error_codes(engine, driver, gpus, caplog):
    """All or none of a batch, and a code, whoever fails."""
    first, second = gpus.allocate(SIZE), gpus.allocate(SIZE)
    batch = [first.address, second.address], [SIZE, SIZE]
    driver.fail("cuPointerGetAttributes", ILLEGAL_ADDRESS, 1)
    refused(caplog, -1, "cuPointerGetAttributes", engine.batch_register_memory, *batch)
    assert engine.batch_register_memory(*batch) == 0
    driver.fail("cuMemcpyAsync", OUT_OF_MEMORY)
    write = engine.write_bytes_to_buffer
    refused(caplog, -1, "cuMemcpyAsync", write, first.address, bytes(8), 8)
    np.testing.assert_array_equal(first.get(), np.full(SIZE, UNTOUCHED))
