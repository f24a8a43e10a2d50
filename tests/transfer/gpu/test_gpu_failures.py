"""A driver that fails or does not answer: an error names the call, and nothing is lost."""

import threading
import time

import numpy as np
import pytest

from mooncake_kernels.buffers import Buffer
from mooncake_kernels.errors import InvalidArgument, TransferError
from mooncake_kernels.transfer import TransferEngine

from ...fake_cuda.driver import ILLEGAL_ADDRESS, OUT_OF_MEMORY
from ...fake_cuda.gpus import GPUS
from ..support import UNTOUCHED, WAIT_S, addressed, engine_pair, untouched

SIZE = (3 << 20) + 5
ENDS = [("gpu", "host"), ("host", "gpu")]


def connect(transport: str, kinds):
    """Engines, and their memory; where the GPU is decides whose calls fail."""
    pair = engine_pair(transport)
    memories = [GPUS.allocate(SIZE).buffer if kind == "gpu" else untouched(SIZE) for kind in kinds]
    return pair, memories


def put(memory, data):
    (memory if isinstance(memory, np.ndarray) else memory.bytes)[:] = data


def get(memory):
    return memory if isinstance(memory, np.ndarray) else memory.bytes


@pytest.mark.parametrize("transport", ["local", "shm", "tcp"])
@pytest.mark.parametrize("verb", ["write", "read"])
@pytest.mark.parametrize("kinds", ENDS, ids="-".join)
@pytest.mark.parametrize(
    ("function", "error", "after"),
    [
        ("cuMemHostAlloc", OUT_OF_MEMORY, 0),
        ("cuStreamCreate", OUT_OF_MEMORY, 0),
        ("cuEventCreate", OUT_OF_MEMORY, 0),
        ("cuEventRecord", ILLEGAL_ADDRESS, 0),
        ("cuMemcpyAsync", ILLEGAL_ADDRESS, 0),
        ("cuMemcpyAsync", ILLEGAL_ADDRESS, 1),
        ("cuEventQuery", ILLEGAL_ADDRESS, 1),
    ],
)
def test_driver_call_failure_fails_the_request(
    driver, transport, verb, kinds, function, error, after
):
    if transport == "local" and (function == "cuMemHostAlloc" or after):
        pytest.skip("local makes no such call")
    made, (near, far) = connect(transport, kinds)
    with made as pair:
        local, remote = pair.regions(near, far)
        put(near if verb == "write" else far, addressed(SIZE))
        call = pair.near.write if verb == "write" else pair.near.read
        row = [(local.address, remote.address, SIZE)]
        driver.fail(function, error, after)
        with pytest.raises(TransferError) as failed:
            call(pair.peer, row, notify=b"done").wait(WAIT_S)
        # A target that fails while it sends can only hang up.
        hung_up = kinds[1] == "gpu" and verb == "read" and after
        assert function in str(failed.value) or hung_up, str(failed.value)
        assert pair.far.receive_notifications() == []
        driver.library.fake_clear()
        call(pair.peer, row).wait(WAIT_S)
        assert np.array_equal(get(near), get(far)) and np.array_equal(get(far), addressed(SIZE))


@pytest.mark.parametrize("transport", ["local", "shm", "tcp"])
def test_hung_gpu_times_out_and_recovers(driver, transport):
    made, (near, far) = connect(transport, ("gpu", "host"))
    with made as pair:
        local, remote = pair.regions(near, far)
        driver.set(hangs=1)
        ticket = pair.near.write(pair.peer, [(local.address, remote.address, SIZE)], deadline_s=0.1)
        threading.Timer(0.5, lambda: driver.set(hangs=0)).start()
        with pytest.raises(TransferError, match=r"deadline of 0\.1 s passed"):
            ticket.wait(WAIT_S)
        assert driver.get("hangs") == 0  # what was under way has been waited for
        near.bytes[:] = addressed(SIZE)
        pair.near.write(pair.peer, [(local.address, remote.address, SIZE)]).wait(WAIT_S)
        assert np.array_equal(far, addressed(SIZE))


def test_permanently_hung_gpu_leaks_its_pinned_memory(driver):
    made, (near, far) = connect("tcp", ("gpu", "host"))
    with made as pair:
        local, remote = pair.regions(near, far)
        driver.set(hangs=1)
        row = [(local.address, remote.address, SIZE)]
        with pytest.raises(TransferError, match=r"deadline of 0\.1 s passed"):
            pair.near.write(pair.peer, row, deadline_s=0.1).wait(WAIT_S)
        driver.set(hangs=0)
    assert driver.get("num_pinned") >= 1  # of each lane: the GPU may write there yet
    driver.library.fake_free_pinned()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_closing_region_mid_transfer_fails_it(driver, transport):
    driver.set(num_looks=4000)  # a slow GPU
    made, (near, far) = connect(transport, ("host", "gpu"))
    with made as pair:
        local, remote = pair.regions(near, far)
        row = [(local.address, remote.address, SIZE)]
        ticket = pair.near.write(pair.peer, row, deadline_s=5)
        time.sleep(0.05)
        driver.set(num_looks=2)
        remote.close()
        before = get(far).copy()
        with pytest.raises(TransferError):
            ticket.wait(WAIT_S)
        assert np.array_equal(get(far), before)  # nobody has touched it since


@pytest.mark.parametrize(
    ("function", "verb"), [("cuMemHostAlloc", "write"), ("cuMemcpyAsync", "read")]
)
def test_files(driver, tmp_path, function, verb):
    path = tmp_path / "pool"
    path.write_bytes(addressed(SIZE).tobytes())
    near = GPUS.allocate(SIZE)
    with TransferEngine() as engine, engine.open(f"file:{path}") as peer:
        engine.register(near.buffer)
        call = engine.write if verb == "write" else engine.read
        driver.fail(function, ILLEGAL_ADDRESS)
        with pytest.raises(TransferError, match=f"{function}: CUDA_ERROR_ILLEGAL_ADDRESS"):
            call(peer, [(near.address, 0, SIZE)]).wait(WAIT_S)
        engine.read(peer, [(near.address, 0, SIZE)]).wait(WAIT_S)
        expected = np.fromfile(path, np.uint8)
        assert np.array_equal(near.get(), expected)


def test_invalid_gpu_registrations_are_rejected(driver):
    memory = GPUS.allocate(8192, device=1).buffer
    host = untouched(4096)
    with TransferEngine() as engine:
        for address, location, got in [
            (memory.address, "cuda:0", "got memory of cuda:1"),
            (host.ctypes.data, "cuda:0", "got memory of the host"),
        ]:
            claim = Buffer(address, 4096, location, True, memory)
            with pytest.raises(InvalidArgument, match="must be memory of cuda:0, " + got):
                engine.register(claim)
        engine.register(memory.part(0, 4096))
        with pytest.raises(InvalidArgument, match="must not overlap"):
            engine.register(memory.part(2048, 8192))
    assert (memory.bytes == UNTOUCHED).all()
