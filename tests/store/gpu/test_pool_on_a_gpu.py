"""Pools whose objects are in the memory of a GPU, alone and under a store."""

import random
from functools import partial

import numpy as np
import pytest
import torch

from mooncake_kernels.buffers import as_buffer, copy_from_host, copy_to_host
from mooncake_kernels.errors import ChecksumError, CudaError, InvalidArgument, Unavailable
from mooncake_kernels.pool import ObjectPool, checksum_of
from mooncake_kernels.transfer import TransferEngine
from mooncake_serving.store import SsdTier, Store, TieredStore, lfu

from ...fake_cuda.driver import ILLEGAL_ADDRESS, OUT_OF_MEMORY
from ...fake_cuda.gpus import IS_FAKE
from ...threads import in_threads
from ...transfer.support import UNTOUCHED
from ..support import STORED, check, content
from .conftest import UNIT
from .support import on_gpu

KEY = (1, 2)


@pytest.fixture(params=[0, 1])
def pool(request, gpus):
    """64 units of 4 KiB on a GPU."""
    with ObjectPool.create(64 * UNIT, device=request.param % gpus.count) as made:
        yield made


@pytest.mark.parametrize("sizes", [[0], [1], [UNIT], [3 * UNIT + 17], [100, 0, UNIT, 7], [1] * 40])
@pytest.mark.parametrize("has_checksum", [True, False])
def test_object_of_pieces_on_gpus_and_host(pool, gpus, sizes, has_checksum):
    """Part i is on GPU 0, GPU 1 or in the host, in turn; and so is where it is read into."""
    whole = content(KEY, sum(sizes))
    parts = np.split(whole, np.cumsum(sizes)[:-1])
    sources = [part if i % 3 == 2 else on_gpu(gpus, part, i % 3) for i, part in enumerate(parts)]
    buffers = [part if i % 3 == 2 else part.buffer for i, part in enumerate(sources)]
    assert pool.put_from(KEY, *buffers, checksum=has_checksum) is STORED
    with pool.pin(KEY) as pinned:
        assert pinned.to_bytes() == whole.tobytes()
        assert pinned.checksum == (checksum_of(whole) if has_checksum else None)
        pinned.verify()

    targets = [
        np.full(size, UNTOUCHED, np.uint8) if i % 3 == 0 else gpus.allocate(max(size, 1), i % 3 - 1)
        for i, size in enumerate(sizes)
    ]
    into = [
        t if i % 3 == 0 else t.part(0, size).buffer
        for i, (t, size) in enumerate(zip(targets, sizes, strict=True))
    ]
    assert pool.get_into(KEY, *into, verify=True) == len(whole)
    np.testing.assert_array_equal(copy_to_host(into), whole)


def test_host_buffers_with_a_gpu_pool(pool):
    """Nothing but the pool is on a GPU."""
    whole = content(KEY, 5 * UNIT + 3)
    assert pool.put_from(KEY, whole[:100], whole[100:].tobytes()) is STORED
    with pool.pin(KEY) as pinned:
        assert pinned.checksum == checksum_of(whole)
    head, tail = np.empty(UNIT, np.uint8), bytearray(4 * UNIT + 3)
    assert pool.get_into(KEY, head, tail, verify=True) == len(whole)
    assert head.tobytes() + bytes(tail) == whole.tobytes()
    part = np.empty(50, np.uint8)
    assert pool.get_into(KEY, part, offset=90) == len(whole)
    np.testing.assert_array_equal(part, whole[90:140])


def test_put_filled_in_place(pool):
    whole = content(KEY, 2 * UNIT)
    with pool.begin(KEY, len(whole)) as put:
        assert put.device == pool.device
        assert put.buffer.writable and put.buffer.location == f"cuda:{pool.device}"
        copy_from_host(whole, [put.buffer])
        assert not pool.contains(KEY)
    with pool.pin(KEY) as pinned:
        assert not pinned.buffer.writable
        assert pinned.checksum == checksum_of(whole) == checksum_of(pinned.buffer)
        np.testing.assert_array_equal(copy_to_host([pinned.buffer]), whole)
        with pytest.raises(InvalidArgument, match=r"view: the object must be in host memory, got"):
            _ = pinned.view


def test_objects_are_aligned(pool):
    for i in range(3):
        assert pool.put_from((i, 0), content((i, 0), 100)) is STORED
        with pool.pin((i, 0)) as pinned:
            assert pinned.buffer.address % pool.alignment == 0


def test_tensors(pool, gpus):
    whole = content(KEY, 2 * UNIT)
    pool.put_from(KEY, whole)
    with pool.pin(KEY) as pinned:
        if IS_FAKE:
            with pytest.raises(Unavailable, match="torch has no CUDA"):
                pinned.tensor()
            return
        tensor = pinned.tensor(torch.int32)
        assert tensor.device.index == pool.device
        np.testing.assert_array_equal(tensor.cpu().numpy(), whole.view(np.int32))
    with pool.begin((3, 4), len(whole)) as put:
        put.tensor(torch.int32).copy_(tensor + 1)
    with pool.pin((3, 4)) as pinned:
        np.testing.assert_array_equal(
            np.frombuffer(pinned.to_bytes(), np.int32), whole.view(np.int32) + 1
        )
        pinned.verify()


def test_memory_outlives_the_pool_while_read(gpus):
    whole = content(KEY, UNIT)
    pool = ObjectPool.create(4 * UNIT, device=0)
    pool.put_from(KEY, whole)
    pinned = pool.pin(KEY)
    buffer = pinned.buffer
    pool.close()
    pinned.close()
    np.testing.assert_array_equal(copy_to_host([buffer]), whole)
    with pytest.raises(InvalidArgument, match="buffer: the object must be open"):
        _ = pinned.buffer


def test_gpu_pool_cannot_be_opened_by_path(pool):
    with pytest.raises(
        InvalidArgument, match=r"path must be of a pool in host memory, .* is on GPU"
    ):
        ObjectPool.open(pool.path)


def test_unsupported_gpu_pool_options_are_rejected(gpus, tmp_path, pool):
    with pytest.raises(InvalidArgument, match=r"path must be None on a GPU, got .*kv"):
        ObjectPool.create(64 * UNIT, tmp_path / "kv", device=0)
    for device in (-1, 1.5, "cuda:0", True):
        with pytest.raises(InvalidArgument, match="device must be an integer"):
            ObjectPool.create(64 * UNIT, device=device)
    with pytest.raises(CudaError):
        ObjectPool.create(64 * UNIT, device=gpus.count)
    with pytest.raises(InvalidArgument, match="page_lock: pool must be in host memory"):
        pool.page_lock()
    with pytest.raises(TypeError, match=r"buffer|bytes-like"):
        memoryview(pool)
    with TransferEngine() as engine:
        with pytest.raises(InvalidArgument, match=r"serve: pool must be in host memory, got one"):
            engine.serve(pool)
    tier = SsdTier(tmp_path / "tier", 64 * UNIT, bucket_bytes=16 * UNIT, slot_bytes=UNIT)
    with pytest.raises(InvalidArgument, match=r"TieredStore: pool must be in host memory, got one"):
        TieredStore(pool, tier)


def test_out_of_gpu_memory_leaves_nothing_behind(gpus, driver):
    before = driver.owned()
    driver.fail("cuMemAlloc", OUT_OF_MEMORY)
    with pytest.raises(CudaError, match="CUDA: cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY"):
        ObjectPool.create(64 * UNIT, device=0)
    driver.fail("cuStreamCreate", OUT_OF_MEMORY)
    with pytest.raises(CudaError, match="cuStreamCreate"):
        ObjectPool.create(64 * UNIT, device=1)
    assert driver.owned() == before


@pytest.mark.parametrize(
    ("function", "after"), [("cuMemcpyAsync", 0), ("cuMemcpyAsync", 2), ("cuStreamSynchronize", 0)]
)
def test_failed_copy_leaves_nothing_behind(pool, gpus, driver, function, after):
    parts = [content((i, 0), UNIT) for i in range(3)]
    before = pool.stats()
    driver.fail(function, ILLEGAL_ADDRESS, after)
    with pytest.raises(CudaError, match=f"CUDA: {function}: CUDA_ERROR_ILLEGAL_ADDRESS"):
        pool.put_from(KEY, *parts)
    assert pool.stats() == before
    assert pool.put_from(KEY, *parts) is STORED
    driver.fail(function, ILLEGAL_ADDRESS, after)
    targets = [np.empty(UNIT, np.uint8) for _ in parts]
    with pytest.raises(CudaError, match=function):
        pool.get_into(KEY, *targets)
    assert pool.stats().num_pins == 0
    assert pool.get_into(KEY, *targets) == 3 * UNIT
    np.testing.assert_array_equal(np.concatenate(targets), np.concatenate(parts))


@pytest.mark.parametrize("function", ["cuStreamSynchronize", "cuMemcpyAsync"])
def test_failed_commit_leaves_the_put_open(pool, driver, function):
    put = pool.begin(KEY, UNIT)
    copy_from_host(content(KEY, UNIT), [put.buffer])
    driver.fail(function, ILLEGAL_ADDRESS)
    with pytest.raises(CudaError, match=function):
        put.commit()
    assert put.is_open and not pool.contains(KEY)
    put.commit()
    assert check(pool) == 1


def test_commit_waits_for_the_default_stream(gpus, driver, pool):
    """The checksum is of what the legacy default stream has written, before the commit."""
    old, new = content((7, 7), UNIT), content(KEY, UNIT)
    source = on_gpu(gpus, new)
    with pool.begin(KEY, UNIT) as put:
        copy_from_host(old, [put.buffer])
        driver.default_stream().copy(as_buffer(put.buffer), as_buffer(source.buffer))
    assert check(pool) == 1


def test_damaged_objects_are_removed_and_not_returned(pool):
    with Store(pool, verify=1.0) as store:
        for key in (1, 2):
            assert store.put(key, content((key, 0), UNIT)) is STORED
        with store.view(1) as pinned:
            copy_from_host(b"?", [_writable(pinned.buffer)])
        target = np.full(UNIT, UNTOUCHED, np.uint8)
        with pytest.raises(ChecksumError, match="not what its checksum says"):
            store.get_into(1, target)
        assert (target == UNTOUCHED).all()
        assert not store.exists(1)
        with store.view(2) as pinned:
            copy_from_host(b"?", [_writable(pinned.buffer)])
        with pytest.raises(ChecksumError):
            store.get(2)
        assert not store.exists(2)


def _writable(buffer):
    return type(buffer)(buffer.address, 1, buffer.location, True, buffer.owner)


@pytest.mark.parametrize("eviction", [None, lfu])
def test_a_store_that_is_always_full(gpus, eviction):
    options = {} if eviction is None else {"eviction": eviction}
    rng = random.Random(1)
    expected: dict[int, bytes] = {}
    with Store.create(16 * UNIT, device=0, evict_ratio=0.0, **options) as store:
        for step in range(300):
            key = rng.randrange(40)
            value = content((key, step), rng.randrange(1, 3 * UNIT)).tobytes()
            if rng.random() < 0.5:
                on_host = rng.random() < 0.5
                given = value if on_host else on_gpu(gpus, np.frombuffer(value, np.uint8)).buffer
                if store.put(key, given) is STORED:
                    expected[key] = value
            elif rng.random() < 0.2:
                assert store.remove(key) <= (key in expected)
            elif (found := store.get(key)) is not None:
                assert found == expected[key]
        keys = [key for key in range(40) if store.exists(key)]
        targets = [gpus.allocate(3 * UNIT, key % 2) for key in keys]
        sizes = store.get_into_each(keys, [target.buffer for target in targets])
        for key, target, size in zip(keys, targets, sizes, strict=True):
            assert target.get()[:size].tobytes() == expected[key]
        assert len(keys) > 4


def test_many_threads_put_and_get(pool, gpus):
    """Each puts and reads; none sees another's bytes."""

    def work(number: int) -> None:
        for i in range(20):
            key = (number, i)
            whole = content(key, UNIT + number)
            assert pool.put_from(key, whole) is STORED
            target = np.empty(len(whole), np.uint8)
            assert pool.get_into(key, target, verify=True) == len(whole)
            np.testing.assert_array_equal(target, whole)
            assert pool.remove(key)

    in_threads(*(partial(work, each) for each in range(4)))
    assert check(pool) == 0
