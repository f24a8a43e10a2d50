"""GPU memory of another process of this machine: by cuda_ipc, or staged if impossible."""

import numpy as np
import pytest

from mooncake_kernels.buffers import shared_memory
from mooncake_kernels.errors import TransferError
from mooncake_kernels.transfer import TransferEngine

from ...fake_cuda.gpus import GPUS, IS_FAKE
from ..support import UNTOUCHED, WAIT_S, addressed, eventually, untouched
from .peers import gpu_peer

MIB = 1 << 20
SIZE = 3 * MIB + 5


@pytest.fixture
def remote(gpus):
    with gpu_peer() as peer:
        yield peer
        if peer.process.is_alive():
            assert peer.close() == {}


@pytest.fixture
def engine(gpus):
    with TransferEngine() as made:
        yield made


def counted(engine, peer) -> dict[str, int]:
    """Bytes written by each path."""
    paths = engine.stats()["paths"][peer.name]
    return {name: path["num_bytes_written"] for name, path in paths.items()}


@pytest.mark.parametrize("transport", ["cuda_ipc", "shm", "tcp"])
@pytest.mark.parametrize("device", [0, 1])
def test_pool_object_on_gpu_is_read(gpus, remote, transport, device):
    """As nodes read it, when it was pinned."""
    near = GPUS.allocate(SIZE)
    address = remote.store(SIZE, device % gpus.count)
    with TransferEngine(transports=[transport]) as engine, engine.open(remote.name()) as peer:
        region = engine.register(near.buffer)
        engine.read(peer, [(region.address, address, SIZE)]).wait(WAIT_S)
        assert np.array_equal(near.get(), addressed(SIZE))


@pytest.mark.parametrize("transports", [None, ["cuda_ipc"], ["shm"], ["tcp"]], ids=str)
@pytest.mark.parametrize("devices", [(0, 0), (0, 1), (1, 0)], ids=str)
def test_writes_and_reads(gpus, remote, transports, devices):
    near = GPUS.allocate(SIZE, devices[0])
    near.put(addressed(SIZE))
    address = remote.register(SIZE, devices[1])
    with TransferEngine(transports=transports) as engine, engine.open(remote.name()) as peer:
        assert peer.transport == (transports[0] if transports else "shm")
        region = engine.register(near.buffer)
        engine.write(peer, [(near.address + 1, address + 3, SIZE - 3)]).wait(WAIT_S)
        there = remote.get(0)
        assert np.array_equal(there[3:], addressed(SIZE)[1:-2])
        assert (there[:3] == UNTOUCHED).all()
        remote.fill(0, 17)
        engine.read(peer, [(near.address, address, SIZE)]).wait(WAIT_S)
        assert np.array_equal(near.get(), np.roll(addressed(SIZE), 17))
        path = engine.explain_path(region, peer, address)
        by_ipc = transports in (None, ["cuda_ipc"])
        assert (path.transport == "cuda_ipc") == by_ipc, path
        assert path.method == ("ipc" if by_ipc else "connection"), path
        if transports is None:
            assert counted(engine, peer)["cuda_ipc"] == SIZE - 3
        if IS_FAKE and by_ipc:  # nothing of it has gone by way of the host
            assert gpus.driver.get("num_pinned") == 0 == remote.driver("get", "num_pinned")


@pytest.mark.parametrize("verb", ["write", "read"])
def test_many_small_blocks(remote, engine, verb):
    size, count = 640, 5000
    near = GPUS.allocate(size * count)
    address = remote.register(size * count, 1)
    engine.register(near.buffer)
    order = np.random.default_rng(3).permutation(count)
    local, there = near.address + np.arange(count) * size, address + order * size
    blocks = addressed(size * count).reshape(count, size)
    with engine.open(remote.name()) as peer:
        if verb == "write":
            near.put(addressed(size * count))
            engine.write_blocks(peer, local, there, size).wait(WAIT_S)
            assert np.array_equal(remote.get(0).reshape(count, size)[order], blocks)
        else:
            remote.fill(0)
            engine.read_blocks(peer, local, there, size).wait(WAIT_S)
            assert np.array_equal(near.get().reshape(count, size), blocks[order])


@pytest.mark.parametrize("transports", [None, ["tcp"]], ids=str)
def test_notification_arrives_after_the_data(gpus, remote, transports):
    near = GPUS.allocate(SIZE)
    address = remote.register(SIZE)
    with TransferEngine(transports=transports) as engine, engine.open(remote.name()) as peer:
        engine.register(near.buffer)
        for step in range(3):
            near.put(np.roll(addressed(SIZE), step))
            ticket = engine.write(peer, [(near.address, address, SIZE)], notify=b"%d" % step)
            text, there = remote.next_notification()
            assert text == b"%d" % step
            assert np.array_equal(there, np.roll(addressed(SIZE), step))
            ticket.wait(WAIT_S)


@pytest.mark.parametrize("transports", [None, ["tcp"]], ids=str)
def test_transfer_does_not_break_graph_capture_in_other_thread(driver, remote, transports):
    """Then the driver refuses many calls of other threads, and gives the graph up."""
    near = GPUS.allocate(SIZE)
    near.put(addressed(SIZE))
    address = remote.register(SIZE)
    remote.driver("set", others_capture=1)
    driver.set(others_capture=1)
    with TransferEngine(transports=transports) as engine, engine.open(remote.name()) as peer:
        engine.register(near.buffer)
        engine.write(peer, [(near.address, address, SIZE)]).wait(WAIT_S)
        assert np.array_equal(remote.get(0), addressed(SIZE))
    assert driver.get("num_forbidden") == 0 == remote.driver("get", "num_forbidden")


@pytest.mark.parametrize("kind", ["pageable", "shared"])
def test_host_memory_at_one_end(remote, engine, kind):
    near = untouched(SIZE) if kind == "pageable" else shared_memory(SIZE).numpy()
    near[:] = addressed(SIZE)
    address = remote.register(SIZE, 1)
    local = engine.register(near)
    with engine.open(remote.name()) as peer:
        engine.write(peer, [(local.address, address, SIZE)]).wait(WAIT_S)
        assert np.array_equal(remote.get(0), addressed(SIZE))
        near[:] = 0
        engine.read(peer, [(local.address, address, SIZE)]).wait(WAIT_S)
        assert np.array_equal(near, addressed(SIZE))
        assert engine.explain_path(local, peer, address).transport == "cuda_ipc"


def test_gpu_to_host_memory_of_peer_uses_staging(remote, engine):
    near = GPUS.allocate(SIZE)
    near.put(addressed(SIZE))
    address = remote.register_host(untouched(SIZE))
    region = engine.register(near.buffer)
    with engine.open(remote.name()) as peer:
        engine.write(peer, [(near.address, address, SIZE)]).wait(WAIT_S)
        near.put(untouched(SIZE))
        engine.read(peer, [(near.address, address, SIZE)]).wait(WAIT_S)
        assert np.array_equal(near.get(), addressed(SIZE))
        path = engine.explain_path(region, peer, address)
        assert (path.transport, path.method) == ("shm", "connection")
        assert "cuda:0 goes by way of pinned memory here" in path.reasons


def test_unexportable_memory_is_staged(remote, engine, driver):
    near = GPUS.allocate(SIZE)
    near.put(addressed(SIZE))
    address = remote.register(SIZE, exportable=False)
    region = engine.register(near.buffer)
    with engine.open(remote.name()) as peer:
        engine.write(peer, [(near.address, address, SIZE)]).wait(WAIT_S)
        assert np.array_equal(remote.get(0), addressed(SIZE))
        path = engine.explain_path(region, peer, address)
        assert (path.transport, path.method) == ("shm", "connection")
        assert "cuIpcGetMemHandle: CUDA_ERROR_INVALID_VALUE" in str(path)
        assert "the peer's cuda:0 goes by way of pinned memory there" in path.reasons
        assert "cuda_ipc" not in counted(engine, peer)
    with TransferEngine(transports=["cuda_ipc"]) as only, only.open(remote.name()) as peer:
        only.register(near.buffer)
        with pytest.raises(TransferError, match="cannot be opened here: the driver does not let"):
            only.write(peer, [(near.address, address, SIZE)]).wait(WAIT_S)


def test_gpu_invisible_to_this_process_is_staged(remote, engine, driver):
    address = remote.register(SIZE)
    remote.driver("set", first_gpu=64)
    near = GPUS.allocate(SIZE)
    near.put(addressed(SIZE))
    region = engine.register(near.buffer)
    with engine.open(remote.name()) as peer:
        engine.write(peer, [(near.address, address, SIZE)]).wait(WAIT_S)
        assert np.array_equal(remote.get(0), addressed(SIZE))
        assert "its GPU is not visible in this process" in str(
            engine.explain_path(region, peer, address)
        )


def test_process_without_cuda_stays_without_a_context(remote, engine, driver):
    here = GPUS.allocate(SIZE)
    here.put(addressed(SIZE))
    address = engine.register(here.buffer).address
    read, path = remote.read(engine.name, address, SIZE)
    assert np.array_equal(read, addressed(SIZE))
    assert "cannot be opened here: this process does not use CUDA" in path
    assert remote.driver("get", "cuInit") == 0
    remote.register(16)  # from now on it does
    read, path = remote.read(engine.name, address, SIZE)
    assert np.array_equal(read, addressed(SIZE))
    assert "cannot be opened" not in path
    assert remote.driver("get", "num_imports") == 0  # closed with the peer


def test_ipc_handles_are_closed_with_region_or_peer(one_lane, remote, engine, driver):
    near = GPUS.allocate(SIZE)
    engine.register(near.buffer)
    first, second = remote.register(SIZE), remote.register(SIZE)
    with engine.open(remote.name()) as peer:
        for address in (first, second):
            engine.write(peer, [(near.address, address, SIZE)]).wait(WAIT_S)
        assert driver.get("num_imports") == 2
        remote.close_region(0)
        with pytest.raises(TransferError, match="is not inside a registered region"):
            engine.write(peer, [(near.address, first, SIZE)]).wait(WAIT_S)
        eventually(lambda: driver.get("num_imports") == 1)
        engine.write(peer, [(near.address, second, SIZE)]).wait(WAIT_S)
        assert driver.get("num_imports") == 1
    eventually(lambda: driver.get("num_imports") == 0)


def test_regions_registered_later_are_found(remote, engine):
    near = GPUS.allocate(SIZE)
    near.put(addressed(SIZE))
    engine.register(near.buffer)
    with engine.open(remote.name()) as peer:
        for index in range(3):
            address = remote.register(SIZE, index % 2)
            engine.write(peer, [(near.address, address, SIZE)]).wait(WAIT_S)
            assert np.array_equal(remote.get(index), addressed(SIZE))


def test_killed_peer_fails_writes_and_closes_imports(remote, engine):
    near = GPUS.allocate(SIZE)
    engine.register(near.buffer)
    address = remote.register(SIZE)
    with engine.open(remote.name()) as peer:
        engine.write(peer, [(near.address, address, SIZE)]).wait(WAIT_S)
        remote.kill()
        with pytest.raises(TransferError):
            engine.write(peer, [(near.address, address, SIZE)], deadline_s=5).wait(WAIT_S)
        if IS_FAKE:
            eventually(lambda: GPUS.driver.get("num_imports") == 0)


def test_cuda_ipc_alone_does_not_move_host_memory(gpus, remote):
    address = remote.register_host(untouched(4096))
    with TransferEngine(transports=["cuda_ipc"]) as engine, engine.open(remote.name()) as peer:
        local = engine.register(untouched(4096))
        with pytest.raises(TransferError, match="cuda_ipc moves memory of GPUs, and neither end"):
            engine.write(peer, [(local.address, address, 4096)]).wait(WAIT_S)
        near = GPUS.allocate(4096)
        engine.register(near.buffer)
        with pytest.raises(TransferError, match="the peer's memory is not mapped here"):
            engine.write(peer, [(near.address, address, 4096)]).wait(WAIT_S)
        with pytest.raises(TransferError, match="is not inside a registered region"):
            engine.write(peer, [(near.address, 4096, 4096)]).wait(WAIT_S)
        engine.write(peer, [], notify=b"still there").wait(WAIT_S)
