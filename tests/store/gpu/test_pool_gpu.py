"""Objects of pools from and to GPU memory: bitwise, in the order of streams, all or nothing."""

import os
import threading

import numpy as np
import pytest

from mooncake_kernels.buffers import as_buffer, copy_from_host, copy_to_host, parts_of
from mooncake_kernels.errors import ChecksumError, CudaError, InvalidArgument, Unavailable
from mooncake_kernels.pool import ObjectPool, PutResult, checksum_of

from ...fake_cuda.driver import ILLEGAL_ADDRESS, INVALID_VALUE
from ...fake_cuda.gpus import IS_FAKE
from ...fake_cuda.new_process import in_new_process
from ...transfer.support import UNTOUCHED
from ..support import content
from .conftest import UNIT
from .support import on_gpu

KEY = (1, 2)


@pytest.mark.parametrize("sizes", [[1], [UNIT], [3 * UNIT + 17], [100, 0, UNIT, 7], [1] * 40])
def test_object_of_pieces_on_gpus_and_host(pool, gpus, sizes):
    """Part i is on GPU 0, GPU 1 or in the host, in turn; and so is where it is read into."""
    whole = content(KEY, sum(sizes))
    parts = np.split(whole, np.cumsum(sizes)[:-1])
    sources = [part if i % 3 == 2 else on_gpu(gpus, part, i % 3) for i, part in enumerate(parts)]
    buffers = [part if i % 3 == 2 else part.buffer for i, part in enumerate(sources)]
    assert pool.put_from(KEY, *buffers) is PutResult.STORED
    with pool.pin(KEY) as pinned:
        np.testing.assert_array_equal(np.frombuffer(pinned.view, np.uint8), whole)
        assert pinned.checksum == checksum_of(whole) == checksum_of(*buffers)

    targets = [
        np.full(size, UNTOUCHED, np.uint8) if i % 3 == 0 else gpus.allocate(size, i % 3 - 1)
        for i, size in enumerate(sizes)
    ]
    into = [target if i % 3 == 0 else target.buffer for i, target in enumerate(targets)]
    assert pool.get_into(KEY, *into, verify=True) == len(whole)
    read = [target if i % 3 == 0 else target.get() for i, target in enumerate(targets)]
    np.testing.assert_array_equal(np.concatenate(read), whole)


def test_objects_of_pieces_on_gpus_and_host_are_begun_together(pool, gpus):
    data = content(KEY, 3 * UNIT)
    held = [on_gpu(gpus, data[:UNIT], 0), on_gpu(gpus, data[UNIT : 2 * UNIT], 1)]
    parts = [*(as_buffer(part.buffer) for part in held), as_buffer(data[2 * UNIT :])]
    places, counts, num_bytes = parts_of([parts, parts[:1]])
    assert counts == [3, 1] and num_bytes == 4 * UNIT
    keys = np.array([KEY, (3, 4)], np.uint64)
    kept = np.zeros(2, np.uint8), np.zeros(2, np.uint16)
    with pool.native.begin_each(keys, places, counts, True, *kept) as begun:
        begun.commit(np.arange(2))
    for key, whole in ((KEY, data), ((3, 4), data[:UNIT])):
        with pool.pin(key) as pinned:
            np.testing.assert_array_equal(np.frombuffer(pinned.view, np.uint8), whole)
            assert pinned.checksum == checksum_of(whole)


def test_get_range_and_get_into_larger_buffers(pool, gpus):
    whole = content(KEY, 3 * UNIT)
    pool.put_from(KEY, on_gpu(gpus, whole).buffer)
    part = gpus.allocate(UNIT)
    assert pool.get_into(KEY, part.buffer, offset=100) == len(whole)
    np.testing.assert_array_equal(part.get(), whole[100 : 100 + UNIT])
    large = gpus.allocate(4 * UNIT, 1)
    assert pool.get_into(KEY, large.buffer) == len(whole)
    np.testing.assert_array_equal(large.get()[: len(whole)], whole)
    assert (large.get()[len(whole) :] == UNTOUCHED).all()
    small = gpus.allocate(UNIT)
    with pytest.raises(InvalidArgument, match="get_into: buffers must have room for 12288"):
        pool.get_into(KEY, small.buffer)
    assert (small.get() == UNTOUCHED).all()


def test_get_each_into_gpus(pool, gpus):
    keys = np.array([(i, 5) for i in range(6)], np.uint64)
    for key in keys.tolist():
        pool.put_from(tuple(key), on_gpu(gpus, content(tuple(key), UNIT), key[0] % 2).buffer)
    missing = np.array([[99, 5]], np.uint64)
    targets = [gpus.allocate(UNIT if i != 3 else 10, i % 2) for i in range(7)]
    sizes = pool.get_into_each(np.concatenate([keys, missing]), [t.buffer for t in targets])
    assert sizes.tolist() == [UNIT, UNIT, UNIT, -2, UNIT, UNIT, -1]
    for i in (0, 1, 2, 4, 5):
        np.testing.assert_array_equal(targets[i].get(), content((i, 5), UNIT))
    assert (targets[6].get() == UNTOUCHED).all()


def test_damaged_object_is_not_copied_to_a_gpu(pool, gpus):
    pool.put_from(KEY, on_gpu(gpus, content(KEY, UNIT)).buffer)
    with pool.pin(KEY) as pinned:
        at = np.frombuffer(pinned.view, np.uint8).ctypes.data - pool.memory().data_ptr()
    pool.memory()[at] ^= 1
    target = gpus.allocate(UNIT)
    with pytest.raises(ChecksumError, match="not what its checksum says"):
        pool.get_into(KEY, target.buffer, verify=True)
    assert (target.get() == UNTOUCHED).all()


def test_copies_from_and_to_host_memory(gpus):
    data = content(KEY, 300)
    first, second = on_gpu(gpus, data[:100]), on_gpu(gpus, data[100:], 1)
    copy = copy_to_host([first.buffer, second.buffer, data[:5]])
    np.testing.assert_array_equal(copy, np.concatenate([data, data[:5]]))
    targets = [gpus.allocate(200), gpus.allocate(200, 1)]
    copy_from_host(data, [target.buffer for target in targets])
    np.testing.assert_array_equal(targets[0].get(), data[:200])
    np.testing.assert_array_equal(targets[1].get()[:100], data[200:])
    assert (targets[1].get()[100:] == UNTOUCHED).all()
    with pytest.raises(InvalidArgument, match="source must be host memory, got cuda:\\d"):
        copy_from_host(second.buffer, [first.buffer])
    with pytest.raises(InvalidArgument, match="buffers must be writable"):
        copy_from_host(data, [b"12345"])


def in_thread(call):
    results = []
    thread = threading.Thread(target=lambda: results.append(call()), daemon=True)
    thread.start()
    return thread, results


def test_put_waits_for_the_stream(pool, gpus, driver):
    """The GPU computes what is stored: the put waits for it, and copies what it has become."""
    stream = driver.stream()
    old, new = content((7, 7), UNIT), content(KEY, UNIT)
    source, computed = on_gpu(gpus, old), on_gpu(gpus, new)
    stream.stall()
    stream.copy(source.buffer, computed.buffer)
    thread, results = in_thread(lambda: pool.put_from(KEY, source.buffer.on(stream)))
    thread.join(0.2)
    assert thread.is_alive()
    assert not pool.contains(KEY)
    stream.release()
    thread.join(30)
    assert results == [PutResult.STORED]
    with pool.pin(KEY) as pinned:
        np.testing.assert_array_equal(np.frombuffer(pinned.view, np.uint8), new)
    stream.close()


def test_get_waits_for_reads_on_the_stream(pool, gpus, driver):
    """What a kernel still reads is not overwritten before it has done so."""
    pool.put_from(KEY, content(KEY, UNIT))
    stream = driver.stream()
    old = content((7, 7), UNIT)
    target, reader = on_gpu(gpus, old), gpus.allocate(UNIT)
    stream.stall()
    stream.copy(reader.buffer, target.buffer)
    thread, results = in_thread(lambda: pool.get_into(KEY, target.buffer.on(stream)))
    thread.join(0.2)
    assert thread.is_alive()
    stream.release()
    thread.join(30)
    assert results == [UNIT]
    np.testing.assert_array_equal(reader.get(), old)
    np.testing.assert_array_equal(target.get(), content(KEY, UNIT))
    stream.close()


def test_stream_under_graph_capture_is_rejected(pool, gpus, driver):
    stream = driver.stream()
    source, target = on_gpu(gpus, content(KEY, UNIT)), gpus.allocate(UNIT)
    pool.put_from(KEY, source.buffer)
    driver.set(is_capturing=1)
    with pytest.raises(Unavailable, match="captured into a graph"):
        pool.put_from((3, 4), source.buffer.on(stream))
    with pytest.raises(Unavailable, match="captured into a graph"):
        pool.get_into(KEY, target.buffer.on(stream))
    driver.set(is_capturing=0)
    assert not pool.contains((3, 4)) and (target.get() == UNTOUCHED).all()
    assert pool.put_from((3, 4), source.buffer.on(stream)) is PutResult.STORED
    stream.close()


@pytest.mark.parametrize("has_no_batch", [0, 1])
def test_page_locked_memory_is_copied_with_one_call(gpus, driver, has_no_batch):
    """Where the driver has it, and not in the default stream, which does not take it."""
    driver.set(has_no_batch=has_no_batch)
    stream = driver.stream()
    whole = content(KEY, 4 * UNIT)
    source = on_gpu(gpus, whole)
    parts = [source.part(i * UNIT, (i + 1) * UNIT).buffer for i in range(4)]
    with ObjectPool.create(64 * UNIT) as pool:
        pool.put_from((1, 1), *(part.on(stream) for part in parts))
        assert driver.get("num_batches") == 0
        pool.page_lock(0)
        pool.put_from((1, 2), *parts)
        assert driver.get("num_batches") == 0
        pool.put_from((1, 3), *(part.on(stream) for part in parts))
        assert driver.get("num_batches") == 1 - has_no_batch
        for key in ((1, 1), (1, 2), (1, 3)):
            with pool.pin(key) as pinned:
                np.testing.assert_array_equal(np.frombuffer(pinned.view, np.uint8), whole)
    stream.close()


@pytest.mark.parametrize(
    ("function", "after"),
    [("cuMemcpyAsync", 0), ("cuMemcpyAsync", 1), ("cuStreamSynchronize", 0)],
)
def test_failed_copy_leaves_nothing_behind(pool, gpus, driver, function, after):
    parts = [on_gpu(gpus, content((i, 0), UNIT)).buffer for i in range(3)]
    before = pool.stats()
    driver.fail(function, ILLEGAL_ADDRESS, after)
    with pytest.raises(CudaError, match=f"CUDA: {function}: CUDA_ERROR_ILLEGAL_ADDRESS"):
        pool.put_from(KEY, *parts)
    assert not pool.contains(KEY)
    assert pool.stats() == before
    assert pool.put_from(KEY, *parts) is PutResult.STORED

    driver.fail(function, ILLEGAL_ADDRESS, after)
    targets = [gpus.allocate(UNIT) for _ in range(3)]
    with pytest.raises(CudaError, match=function):
        pool.get_into(KEY, *(target.buffer for target in targets))
    assert pool.stats().num_pins == 0
    assert pool.get_into(KEY, *(target.buffer for target in targets)) == 3 * UNIT
    np.testing.assert_array_equal(targets[2].get(), content((2, 0), UNIT))


def test_page_lock_lasts_as_long_as_the_pool(gpus):
    with ObjectPool.create(64 * UNIT) as pool:
        pool.page_lock(0)
        pool.page_lock(1)  # it is, for all
        if IS_FAKE:
            assert gpus.driver.get("num_pinned") == 1
        pool.put_from(KEY, b"12345")
        pinned = pool.pin(KEY)
    if IS_FAKE:
        assert gpus.driver.get("num_pinned") == 1
    assert bytes(pinned.view) == b"12345"
    pinned.close()
    del pool, pinned
    if IS_FAKE:
        assert gpus.driver.get("num_pinned") == 0


def test_failed_page_lock_is_raised(driver):
    with ObjectPool.create(64 * UNIT) as pool:
        driver.fail("cuMemHostRegister", INVALID_VALUE)
        with pytest.raises(CudaError, match="cuMemHostRegister: CUDA_ERROR_INVALID_VALUE"):
            pool.page_lock(0)
        pool.page_lock(0)
        assert driver.get("num_pinned") == 1
        for wrong in (-1, "cuda:0", 0.5, True):
            with pytest.raises(InvalidArgument, match="page_lock: device must be"):
                pool.page_lock(wrong)
        with (
            pytest.raises(CudaError, match="cuDeviceGet: CUDA_ERROR_INVALID_DEVICE"),
            ObjectPool.create(UNIT) as other,
        ):
            other.page_lock(7)


def _put_and_get(device: int | None, page_lock: int | None) -> bytes:
    with ObjectPool.create(64 * UNIT, device=device) as pool:
        if page_lock is not None:
            pool.page_lock(page_lock)
        pool.put_from(KEY, b"12345")
        read = bytearray(5)
        pool.get_into(KEY, read)
        return bytes(read)


@pytest.mark.parametrize(("device", "page_lock"), [(0, None), (1, None), (None, 0)])
def test_put_and_get_in_a_process_new_to_cuda(gpus, device, page_lock):
    place = None if device is None else device % gpus.count
    assert in_new_process(_put_and_get, place, page_lock) == b"12345"


def test_forked_child_cannot_use_cuda(gpus):
    gpus.allocate(1)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with pytest.raises(CudaError, match="CUDA: cuInit: CUDA_ERROR_NOT_INITIALIZED"):
                ObjectPool.create(64 * UNIT, device=0)
            with ObjectPool.create(64 * UNIT) as pool:
                pool.put_from(KEY, b"12345")
                assert not pool.pin(KEY).buffer.location.startswith("cuda")
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0


def test_location_of_a_buffer(gpus):
    memory = gpus.allocate(16, 1)
    buffer = as_buffer(memory.buffer)
    assert not buffer.is_host
    assert as_buffer(b"1").is_host
