"""``BufferPool``, and memory of ``alloc_from_mem_pool``."""

import ctypes
import gc
import threading
import time

import numpy as np
import pytest

from mooncake_serving.compat.mooncake import store as module
from mooncake_serving.compat.mooncake.store import (
    INVALID_PARAMS,
    BufferPool,
    MooncakeDistributedStore,
)

from .store_support import reasons, value_of
from .support import WAIT_S

SMALL = {"min_size_class": 4096, "alignment": 4096}


def one_region(store, **options) -> BufferPool:
    return BufferPool(store, max_size_class=4096, max_regions=1, **SMALL, **options)


def test_lent_memory_is_registered_and_used_again(store):
    pool = BufferPool(store, **SMALL)
    lease = pool.acquire(1234)
    address = lease.ptr
    assert lease.size == len(lease.buffer) == 1234 and address % 4096 == 0
    lease.buffer[:4] = b"abcd"
    assert store.put_from("a", lease.ptr, 4) == 0 and store.get("a") == b"abcd"
    assert store.get_into("a", lease.ptr + 100, 4) == 4 and bytes(lease.buffer[100:104]) == b"abcd"
    assert store.register_buffer(address, 4) == module.INVALID_PARAMS  # it is
    lease.release()
    lease.release()
    with pool.buffer(2048) as again:
        assert again.ptr == address and again.size == 2048
    pool.close()
    pool.close()
    assert store.register_buffer(address, 4) != 0 or store.unregister_buffer(address) == 0


def test_released_lease_has_no_memory(store):
    pool = BufferPool(store)
    lease = pool.acquire(10)
    lease.release()
    assert lease.size == 10
    with pytest.raises(RuntimeError, match="closed"):
        lease.ptr  # noqa: B018
    with pytest.raises(BufferError, match="closed"):
        lease.buffer  # noqa: B018
    pool.close()
    for call in (lambda: pool.acquire(1), lambda: pool.prewarm(1, 1)):
        with pytest.raises(RuntimeError, match="the buffer pool is closed"):
            call()


@pytest.mark.parametrize("derive", [lambda v: v, lambda v: v[:2], np.asarray, bytes])
def test_views_keep_memory_lent(store, derive):
    pool = one_region(store)
    lease = pool.acquire(4)
    view = lease.buffer
    view[:] = b"test"
    kept = derive(view)
    del view
    if isinstance(kept, bytes):
        lease.release()
    else:
        with pytest.raises(RuntimeError, match="exported views"):
            lease.release()
        del lease
        gc.collect()
        with pytest.raises(RuntimeError, match="exhausted"):
            pool.acquire(1, block=False)
        with pytest.raises(RuntimeError, match="active leases"):
            pool.close()
    assert bytes(kept)[:2] == b"te"
    del kept
    gc.collect()
    pool.acquire(1, block=False).release()
    pool.close()


def test_dropped_lease_gives_its_memory_back(store):
    pool = one_region(store)
    for _ in range(3):
        pool.acquire(1, block=False)
        gc.collect()
    pool.close()


def test_without_room_acquire_waits_or_fails(store):
    pool = one_region(store)
    lease = pool.acquire(1)
    for options in ({"block": False}, {"timeout": 0}, {"timeout": 0.05}):
        with pytest.raises(RuntimeError, match="exhausted"):
            pool.acquire(1, **options)
    got = []
    thread = threading.Thread(target=lambda: got.append(pool.acquire(2, timeout=WAIT_S)))
    thread.start()
    time.sleep(0.05)
    lease.release()
    thread.join(WAIT_S)
    assert got[0].size == 2
    with pytest.raises(RuntimeError, match="active leases"):
        pool.close()
    got.pop().release()
    pool.close()
    with one_region(store, block_on_exhaustion=False, default_timeout=5).acquire(1):
        pass


def test_bounds(store):
    pool = BufferPool(store, 16384, max_size_class=8192, **SMALL)
    with pool.acquire(8193) as large, pool.acquire(4096):
        assert large.size == 8193
        with pytest.raises(RuntimeError, match="exhausted"):
            pool.acquire(4097, block=False)
    with pool.acquire(8192), pool.acquire(8192):  # what is idle makes room
        pass
    for size in (16385, 2**64 - 1):
        with pytest.raises(RuntimeError, match="capacity"):
            pool.acquire(size)
    pool.close()
    pool = BufferPool(store)
    for size in (1 << 61, 2**64 - 1):
        with pytest.raises(RuntimeError, match="capacity"):
            pool.acquire(size)
    pool.close()


@pytest.mark.parametrize("size", [0, 1, 4097])
def test_sizes(store, size):
    pool = BufferPool(store, 1 << 20, prewarm_size=4097, prewarm_count=2, **SMALL)
    lease = pool.acquire(size)
    assert lease.size == len(lease.buffer) == size and lease.ptr
    lease.release()
    pool.close()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"alignment": 12345}, "alignment must be a power of two"),
        ({"alignment": 0}, "alignment must be a power of two"),
        ({"min_size_class": 0}, "min_size_class must be an integer from 1"),
        ({"max_bytes": -1}, "max_bytes must be an integer"),
        ({"max_regions": 0}, "max_regions must be an integer from 1"),
        ({"max_bytes": 4096, "prewarm_count": 2, **SMALL}, "exhausted"),
    ],
)
def test_wrong_arguments_of_a_pool(store, arguments, reason):
    with pytest.raises(RuntimeError, match=reason):
        BufferPool(store, **arguments)


@pytest.mark.parametrize("store", [MooncakeDistributedStore(), None, 5], ids=["new", "none", "int"])
def test_a_pool_needs_a_store(store):
    with pytest.raises(RuntimeError, match="store must be a MooncakeDistributedStore that is set"):
        BufferPool(store)


@pytest.mark.parametrize("size", [-1, "1", 1.5, None])
def test_wrong_sizes(store, size):
    pool = BufferPool(store)
    with pytest.raises(RuntimeError, match="size must be an integer"):
        pool.acquire(size)
    with pytest.raises(RuntimeError, match="timeout must be non-negative"):
        pool.acquire(1, timeout=-1)
    pool.close()


def test_a_store_that_is_closed_first(store):
    pool = BufferPool(store)
    lease = pool.acquire(8)
    store.close()
    lease.buffer[:] = value_of(1, 8)  # the memory stays
    lease.release()
    pool.close()


def test_a_dropped_pool_leaves_nothing_registered(store):
    pool = BufferPool(store, **SMALL)
    lease = pool.acquire(4096)
    idle, lent = pool.acquire(4096), lease.ptr
    address = idle.ptr
    idle.release()
    del idle, pool
    gc.collect()
    assert store.unregister_buffer(address) == INVALID_PARAMS
    lease.buffer[:1] = b"x"  # what is lent stays until the lease ends
    assert store.put_from("a", lent, 1) == 0
    lease.release()
    assert store.unregister_buffer(lent) == INVALID_PARAMS


def test_a_pool_that_cannot_be_filled_leaves_nothing_registered(store, monkeypatch):
    registered = []
    real = store.register_buffer
    monkeypatch.setattr(store, "register_buffer", lambda *a: registered.append(a[0]) or real(*a))
    with pytest.raises(RuntimeError, match="exhausted") as raised:
        BufferPool(store, 8192, prewarm_size=4096, prewarm_count=3, **SMALL)
    assert raised.traceback and len(registered) == 2
    assert [store.unregister_buffer(address) for address in registered] == [INVALID_PARAMS] * 2


def test_threads_share_a_pool(store):
    pool = BufferPool(store, 4 * 4096, max_size_class=4096, **SMALL)
    failed = []

    def run(seed: int) -> None:
        for i in range(50):
            with pool.acquire(64, timeout=WAIT_S) as lease:
                value = value_of(seed * 100 + i, 64)
                lease.buffer[:] = value
                if bytes(lease.buffer) != value:
                    failed.append(seed)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    pool.close()
    assert not failed


def test_memory_of_the_pool(store, caplog):
    address = store.alloc_from_mem_pool(64)
    memory = (ctypes.c_ubyte * 64).from_address(address)
    assert bytes(memory) == bytes(64) and store.register_buffer(address, 64) == 0
    assert store.put("a", value_of(1, 64)) == 0 and store.get_into("a", address, 64) == 64
    assert bytes(memory) == value_of(1, 64)
    for size in (0, -1, "1", 1 << 62):
        assert store.alloc_from_mem_pool(size) == 0
        reasons(caplog, "alloc_from_mem_pool: ")
    assert store.unregister_buffer(address) == store.close() == 0
    assert bytes(memory) == value_of(1, 64)
    assert store.alloc_from_mem_pool(64) == MooncakeDistributedStore().alloc_from_mem_pool(64) == 0
