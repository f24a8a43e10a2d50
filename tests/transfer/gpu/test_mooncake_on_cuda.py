"""Mooncake's transfers in a CUDA stream, which waits for them.

While the made-up driver calls a host function it does no other work, and permits no calls: see
tests/fake_cuda/host_functions.cc. So a transfer that needed a GPU would end by its deadline.
"""

import contextlib
import ctypes
import logging
import re
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mooncake_kernels import config
from mooncake_kernels.errors import CudaError, InvalidArgument, TransferError, Unavailable
from mooncake_kernels.transfer.stream_transfers import StreamTransfers
from mooncake_serving.compat.mooncake import TransferEngine, names

from ...compat.support import other_process, start
from ...fake_cuda.driver import INVALID_VALUE
from ...fake_cuda.gpus import GPUS, IS_FAKE
from ..support import UNTOUCHED, addressed, eventually, untouched

SIZE = 1 << 20
BLOCK, COUNT = 4096, 64


def part(array: np.ndarray) -> SimpleNamespace:
    """Host memory, for the copies of a stream."""
    return SimpleNamespace(address=array.ctypes.data, num_bytes=array.nbytes)


class Ends:
    """Two engines, how the first one calls the other, and host memory of both."""

    def __init__(self, here: TransferEngine, there: TransferEngine):
        self.here, self.there = here, there
        self.peer = f"127.0.0.1:{there.get_rpc_port()}"
        self.near, self.far = untouched(SIZE), untouched(SIZE)
        assert here.register_memory(self.near.ctypes.data, SIZE) == 0
        assert there.register_memory(self.far.ctypes.data, SIZE) == 0

    @property
    def row(self) -> tuple[str, int, int, int]:
        return self.peer, self.near.ctypes.data, self.far.ctypes.data, SIZE


@pytest.fixture(params=["local", "shm", "tcp"])
def ends(request, gpus, monkeypatch):
    monkeypatch.setitem(names._TRANSPORTS, "tcp", (request.param,))
    with config.override(secret="what both of us know"):
        here, there = start(TransferEngine()), start(TransferEngine())
    with contextlib.closing(here), contextlib.closing(there):
        yield Ends(here, there)
        streams = here._state and here._state.streams
        assert not streams or eventually(lambda: not streams._enqueued)


@pytest.fixture
def stream(driver):
    stream = driver.stream()
    yield stream
    stream.close()


def errors_of(caplog) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.levelno == logging.ERROR]


def is_told(caplog, engine: TransferEngine, reason: str) -> bool:
    assert engine.check_transfers_on_cuda() == -1
    (error,) = (one for one in errors_of(caplog) if one.startswith("check_transfers_on_cuda: "))
    return re.search(f"a transfer in a stream failed: .*{reason}", error) is not None


def test_write_starts_when_the_stream_reaches_it(ends, stream):
    data = GPUS.allocate(SIZE)
    data.put(addressed(SIZE))
    stream.stall()
    stream.copy(part(ends.near), data.buffer)
    assert ends.here.transfer_write_on_cuda(*ends.row, stream.handle) is None
    stream.copy(part(ends.near), GPUS.allocate(SIZE).buffer)  # waits for the transfer
    time.sleep(0.02)
    assert (ends.near == UNTOUCHED).all() and (ends.far == UNTOUCHED).all()
    stream.release()
    stream.synchronize()
    np.testing.assert_array_equal(ends.far, addressed(SIZE))
    assert (ends.near == UNTOUCHED).all()
    assert ends.here.check_transfers_on_cuda() == 0


def test_work_queued_after_read_sees_its_data(ends, stream):
    ends.far[:] = addressed(SIZE)
    target = GPUS.allocate(SIZE)
    offsets = np.arange(COUNT) * BLOCK
    blocks = ends.near.ctypes.data + offsets, ends.far.ctypes.data + offsets[::-1]
    ends.here.batch_transfer_read_on_cuda(
        ends.peer, *blocks, np.full(COUNT, BLOCK), stream_ptr=stream.handle
    )
    stream.copy(target.buffer, part(ends.near))
    stream.synchronize()
    expected = untouched(SIZE)
    whole = addressed(COUNT * BLOCK).reshape(COUNT, BLOCK)[::-1]
    expected[: COUNT * BLOCK] = whole.reshape(-1)
    np.testing.assert_array_equal(target.get(), expected)


def test_transfers_on_one_stream_run_in_order(ends, stream):
    """A flag that is written after its data is not there before it."""
    address, there = ends.near.ctypes.data, ends.far.ctypes.data
    values = [GPUS.allocate(8) for _ in range(20)]
    for i, value in enumerate(values):
        value.put(np.full(8, i, np.uint8))
        stream.copy(part(ends.near[:8]), value.buffer)
        ends.here.transfer_write_on_cuda(ends.peer, address, there + 8 * i, 8, stream.handle)
    for i in range(20):
        ends.here.transfer_read_on_cuda(
            ends.peer, address + 8 * i, there + 8 * i, 8, stream_ptr=stream.handle
        )
    stream.synchronize()
    expected = np.repeat(np.arange(20, dtype=np.uint8), 8)
    np.testing.assert_array_equal(ends.far[:160], expected)
    np.testing.assert_array_equal(ends.near[:160], expected)


def test_streams_do_not_wait_for_each_other(ends, stream, driver):
    ends.near[:] = addressed(SIZE)
    held = driver.stream()
    held.stall()
    for _ in range(20):
        ends.here.transfer_write_on_cuda(*ends.row, held.handle)
    ends.here.batch_transfer_write_on_cuda(
        ends.peer, [ends.near.ctypes.data], [ends.far.ctypes.data], [BLOCK], stream.handle
    )
    stream.synchronize()
    np.testing.assert_array_equal(ends.far[:BLOCK], addressed(BLOCK))
    assert (ends.far[BLOCK:] == UNTOUCHED).all()
    held.release()
    held.synchronize()
    np.testing.assert_array_equal(ends.far, addressed(SIZE))
    held.close()


def test_blocking_calls_proceed_while_a_stream_stalls(ends, stream):
    """Memory of a GPU, too: they have connections of their own."""
    data = GPUS.allocate(SIZE)
    data.put(addressed(SIZE))
    assert ends.here.register_memory(data.address, SIZE) == 0
    stream.stall()
    ends.here.transfer_read_on_cuda(*ends.row, stream.handle)
    there = ends.far.ctypes.data
    assert ends.here.transfer_sync_write(ends.peer, data.address, there, SIZE) == 0
    stream.release()
    stream.synchronize()
    np.testing.assert_array_equal(ends.near, addressed(SIZE))


def test_timeout_starts_when_the_stream_arrives(gpus, stream, monkeypatch, caplog):
    monkeypatch.setattr(names, "timeout_s", lambda: 2.0)
    monkeypatch.setitem(names._TRANSPORTS, "tcp", ("tcp",))
    monkeypatch.setattr(StreamTransfers, "_check_far", lambda *_: None)  # it has no secret
    with contextlib.closing(start(TransferEngine())) as here, other_process() as other:
        near = addressed(SIZE)
        assert here.register_memory(near.ctypes.data, SIZE) == 0
        row = other.name, near.ctypes.data, other.address, SIZE, stream.handle
        stream.stall()
        here.transfer_write_on_cuda(*row)
        time.sleep(2.1)
        stream.release()
        stream.synchronize()
        assert here.check_transfers_on_cuda() == 0
        other.sees(addressed(SIZE))
        other.stop()
        here.transfer_read_on_cuda(*row)
        stream.synchronize()
        assert is_told(caplog, here, "deadline of 2")
        assert here.check_transfers_on_cuda() == 0
        other.go_on()


def test_failure_blocks_stream_until_it_is_checked(gpus, stream, monkeypatch, caplog):
    with contextlib.closing(start(TransferEngine())) as here:
        near, flag, offset = addressed(SIZE), untouched(8), 0
        assert here.register_memory(near.ctypes.data, SIZE) == 0
        with contextlib.closing(start(TransferEngine())) as there, other_process() as other:
            assert there.register_memory(flag.ctypes.data, 8) == 0
            peer = f"127.0.0.1:{there.get_rpc_port()}"
            say_so = peer, near.ctypes.data + offset, flag.ctypes.data, 8, stream.handle
            stream.stall()
            here.transfer_write_on_cuda(
                other.name, near.ctypes.data, other.address, SIZE, stream.handle
            )
            here.transfer_write_on_cuda(*say_so)
            stream.stall()
            here.transfer_write_on_cuda(*say_so)
            other.kill()
            stream.release()
            eventually(lambda: len(errors_of(caplog)) == 2)
            first, second = errors_of(caplog)
            assert first.startswith(f"transfer_write_on_cuda: transfer with {other.name}: ")
            assert second == (
                "transfer_write_on_cuda: not begun, because an earlier transfer in a stream had "
                "failed"
            )
            with pytest.raises(TransferError, match="a transfer in a stream failed: ") as error:
                here.transfer_read_on_cuda(*say_so)
            assert error.value.peer == other.name and error.value.num_bytes_total == SIZE
            stream.release()  # it was enqueued when nobody knew
            stream.synchronize()
            assert (flag == UNTOUCHED).all()
            assert here.check_transfers_on_cuda() == 0
            here.transfer_write_on_cuda(*say_so)
            stream.synchronize()
            np.testing.assert_array_equal(flag, addressed(8))


def test_memory_unregistered_before_stream_arrival_fails(ends, stream, caplog):
    ends.near[:] = addressed(SIZE)
    stream.stall()
    ends.here.transfer_write_on_cuda(*ends.row, stream.handle)
    assert ends.here.unregister_memory(ends.near.ctypes.data) == 0
    stream.release()
    stream.synchronize()
    assert (ends.far == UNTOUCHED).all()
    assert is_told(caplog, ends.here, "a region in use was closed")


def test_engine_closed_before_stream_arrival_fails_transfer(ends, stream, caplog):
    stream.stall()
    ends.here.transfer_write_on_cuda(*ends.row, stream.handle)
    streams = ends.here._state.streams
    ends.here.close()
    stream.release()
    stream.synchronize()
    eventually(lambda: not streams._enqueued)
    assert "closed" in errors_of(caplog)[0] and (ends.far == UNTOUCHED).all()


def test_memory_of_gpus_is_refused(ends, stream):
    near, far = GPUS.allocate(SIZE), GPUS.allocate(SIZE)
    assert ends.here.register_memory(near.address, SIZE) == 0
    assert ends.there.register_memory(far.address, SIZE) == 0
    peer, here, there, _ = ends.row
    before = GPUS.driver.get("cuLaunchHostFunc")
    for write in (ends.here.transfer_write_on_cuda, ends.here.transfer_read_on_cuda):
        with pytest.raises(Unavailable, match="local memory must be of the host"):
            write(peer, near.address, there, SIZE, stream.handle)
        with pytest.raises(Unavailable, match=rf"of its host, .* got {far.address + 8:#x}"):
            write(peer, here, far.address + 8, 8, stream.handle)
    assert GPUS.driver.get("cuLaunchHostFunc") == before
    assert ends.here.transfer_sync_write(peer, near.address, far.address, SIZE) == 0


def test_why_memory_of_gpus_is_refused(gpus, stream, monkeypatch, caplog):
    """The copies by a GPU for which a stream waits may wait for that stream."""
    monkeypatch.setattr(names, "timeout_s", lambda: 0.5)
    monkeypatch.setattr(StreamTransfers, "_check_far", lambda *_: None)
    here, there = start(TransferEngine()), start(TransferEngine())
    with contextlib.closing(here), contextlib.closing(there):
        (peer, address, _, _), far = Ends(here, there).row, GPUS.allocate(SIZE)
        assert there.register_memory(far.address, SIZE) == 0
        here.transfer_write_on_cuda(peer, address, far.address, SIZE, stream.handle)
        stream.synchronize()
        assert is_told(caplog, here, "deadline of 0.5")


def test_stream_transfer_does_not_need_the_gil(ends, stream, driver):
    """Who holds it may wait for the stream."""
    ends.near[:] = addressed(SIZE)
    library = ctypes.PyDLL(driver.library._name)
    for _ in range(5):
        ends.here.transfer_write_on_cuda(*ends.row, stream.handle)
        library.fake_synchronize(ctypes.c_void_p(stream.handle))
    np.testing.assert_array_equal(ends.far, addressed(SIZE))


def test_peer_that_hides_its_regions_is_rejected(gpus, stream, monkeypatch):
    monkeypatch.setitem(names._TRANSPORTS, "tcp", ("tcp",))
    here, there = start(TransferEngine()), start(TransferEngine())
    with contextlib.closing(here), contextlib.closing(there):
        ends = Ends(here, there)
        with pytest.raises(TransferError, match="must say which of its memory .* the secret"):
            here.transfer_write_on_cuda(*ends.row, stream.handle)


def test_memory_registered_later_by_peer_is_found(ends, stream):
    peer, here, there, _ = ends.row
    ends.here.transfer_write_on_cuda(peer, here, there, 8, stream.handle)
    other = untouched(8)
    row = peer, here, other.ctypes.data, 8, stream.handle
    with pytest.raises(Unavailable, match="registered there"):
        ends.here.transfer_write_on_cuda(*row)
    assert ends.there.register_memory(other.ctypes.data, 8) == 0
    ends.near[:] = addressed(SIZE)
    ends.here.transfer_write_on_cuda(*row)
    stream.synchronize()
    np.testing.assert_array_equal(other, addressed(8))


def test_invalid_arguments_enqueue_nothing(ends, stream, driver):
    peer, here, there, size = ends.row
    write = ends.here.transfer_write_on_cuda
    with pytest.raises(InvalidArgument, match="not inside"):
        write(peer, here + 1, there, size, stream.handle)
    with pytest.raises(InvalidArgument, match="equally long, got 1, 1, 2"):
        ends.here.batch_transfer_read_on_cuda(peer, [here], [there], [8, 8], stream.handle)
    with pytest.raises(InvalidArgument, match="stream_ptr must be an integer"):
        write(*ends.row, "stream")
    with pytest.raises(Unavailable, match="no GPU is current in this thread"):
        write(*ends.row)
    with pytest.raises(CudaError, match="cuStreamGetCtx"):
        write(*ends.row, 4711)
    with pytest.raises(TransferError):
        write("127.0.0.1:1", here, there, size, stream.handle)
    driver.set(is_capturing=1)
    with pytest.raises(Unavailable, match="captured into a graph"):
        write(*ends.row, stream.handle)
    driver.set(is_capturing=0)
    driver.fail("cuLaunchHostFunc", INVALID_VALUE)
    with pytest.raises(CudaError, match="cuLaunchHostFunc: CUDA_ERROR_INVALID_VALUE"):
        write(*ends.row, stream.handle)
    write(peer, here, there, 0, stream.handle)
    stream.synchronize()
    assert (ends.far == UNTOUCHED).all()
    ends.near[:] = addressed(SIZE)
    write(*ends.row, stream.handle)
    stream.synchronize()
    np.testing.assert_array_equal(ends.far, addressed(SIZE))


def test_default_stream_of_current_gpu_is_used(ends, driver):
    context = ctypes.create_string_buffer(8)
    ends.near[:] = addressed(SIZE)
    assert driver.library.cuCtxPushCurrent_v2(context) == 0
    ends.here.transfer_write_on_cuda(*ends.row)
    assert driver.library.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p())) == 0
    driver.default_stream().synchronize()
    np.testing.assert_array_equal(ends.far, addressed(SIZE))


@pytest.mark.skipif(IS_FAKE, reason="torch knows no made-up GPU")
def test_torch_streams(ends):
    data = torch.from_numpy(addressed(SIZE))
    pinned, source, target = data.pin_memory(), data.cuda(), torch.zeros_like(data).cuda()
    pinned.zero_()
    torch.cuda.synchronize()
    assert ends.here.register_memory(pinned.data_ptr(), SIZE) == 0
    stream = torch.cuda.Stream()
    row = ends.peer, pinned.data_ptr(), ends.far.ctypes.data, SIZE, stream.cuda_stream
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # cycles: a tenth of a second
        pinned.copy_(source, non_blocking=True)
        ends.here.transfer_write_on_cuda(*row)
        pinned.copy_(target, non_blocking=True)  # zeros
        ends.here.transfer_read_on_cuda(*row)
        target.copy_(pinned, non_blocking=True)
    stream.synchronize()
    assert ends.here.check_transfers_on_cuda() == 0
    np.testing.assert_array_equal(ends.far, addressed(SIZE))
    assert torch.equal(target, source)
