"""The registration cache: what it finds, what it evicts, what it never does."""

import contextlib
import errno

import numpy as np
import pytest
import torch

from mooncake_kernels import InvalidArgument, Unavailable, rdma
from mooncake_kernels.buffers import Buffer

from .gpu import MIB

MEMORY = np.zeros(1 << 16, np.uint8)
BASE = MEMORY.ctypes.data


def part(begin: int, end: int) -> Buffer:
    """Memory that nobody owns: it is not watched."""
    return Buffer(BASE + begin, end - begin, "cpu:0", True, None)


@pytest.fixture
def make_cache(device):
    with contextlib.ExitStack() as stack:
        yield lambda **bounds: stack.enter_context(rdma.RegistrationCache([device], **bounds))


def use(cache, begin: int, end: int) -> rdma.Region:
    with cache.lease(part(begin, end)) as lease:
        [region] = lease.regions
        return region


def stats(cache, *names: str):
    return tuple(cache.stats()[f"num_{name}"] for name in names)


def test_covering_region_is_reused(world, make_cache):
    cache = make_cache()
    with cache.lease(part(100, 5000)) as lease:
        [region] = lease.regions
        key = region.rkey
        assert (region.address, region.num_bytes) == (BASE + 100, 4900)
        assert region.access == "remote_read_write"
        with cache.lease(part(200, 300)) as inner:
            assert inner.regions[0].rkey == key
            assert inner.regions[0].num_bytes == 4900
    for begin, end in ((100, 5000), (100, 101), (4999, 5000)):
        assert use(cache, begin, end).rkey == key
    assert stats(cache, "hits", "misses", "regions", "bytes", "leased") == (4, 1, 1, 4900, 0)
    for begin, end in ((99, 200), (4999, 5001), (5001, 5010), (0, 6000)):
        assert use(cache, begin, end).rkey != key
    # The last of them holds the others, which are therefore given up.
    assert stats(cache, "regions", "bytes", "misses") == (1, 6000, 5)
    assert world.live()["region"] == 1


def test_least_recently_used_region_is_evicted_first(make_cache):
    cache = make_cache(max_regions=3)
    keys = [use(cache, 1000 * i, 1000 * i + 10).rkey for i in range(3)]
    assert use(cache, 0, 10).rkey == keys[0]
    use(cache, 9000, 9010)
    assert stats(cache, "regions", "evictions") == (3, 1)
    assert use(cache, 0, 10).rkey == keys[0] and use(cache, 2000, 2010).rkey == keys[2]
    assert use(cache, 1000, 1010).rkey != keys[1]


def test_bytes_are_bounded(world, make_cache):
    cache = make_cache(max_bytes=10000)
    for begin in (0, 10000, 20000):
        use(cache, begin, begin + 4000)
    assert stats(cache, "regions", "bytes") == (2, 8000)
    use(cache, 30000, 45000)  # more than is allowed: it stays while it is used
    assert stats(cache, "regions", "bytes") == (0, 0) and world.live().get("region") is None


def test_leased_regions_are_never_evicted(world, make_cache):
    cache = make_cache(max_regions=1, max_bytes=10)
    leases = [cache.lease(part(1000 * i, 1000 * i + 100)) for i in range(5)]
    assert stats(cache, "regions", "leased", "bytes") == (5, 5, 500)
    for lease in leases:
        assert lease.regions[0].pieces
        lease.close()
        lease.close()
    assert stats(cache, "regions", "leased", "bytes") == (0, 0, 0)


def test_closing_a_leased_region_keeps_other_leases_valid(world, make_cache):
    cache = make_cache()
    with cache.lease(part(0, 200)) as lease, cache.lease(part(50, 100)) as other:
        with other.regions[0] as region:
            pass
        region.close()
        assert not region.closed and lease.regions[0].pieces
        assert stats(cache, "regions", "misses") == (1, 1)
    assert world.live()["region"] == 1


def test_invalidated_ranges_are_not_found(world, make_cache):
    cache = make_cache()
    keys = {i: use(cache, 1000 * i, 1000 * i + 500).rkey for i in range(6)}
    leased = cache.lease(part(2000, 2100))
    assert cache.invalidate((BASE + 1499, 502)) == 2  # one byte of the first, one of the next
    assert cache.invalidate(part(4500, 5000)) == 0
    assert cache.invalidate(part(0, 1)) == 1
    assert leased.regions[0].pieces  # stays for its lease
    assert world.live()["region"] == 4
    leased.close()
    assert stats(cache, "regions", "leased", "bytes", "invalidations") == (3, 0, 1500, 3)
    for i, key in keys.items():
        assert (use(cache, 1000 * i, 1000 * i + 500).rkey == key) == (i >= 3)


def test_close_keeps_leased_regions_until_released(world, make_cache):
    cache = make_cache()
    lease = cache.lease(part(0, 100))
    use(cache, 1000, 1100)
    cache.close()
    assert lease.regions[0].pieces and world.live()["region"] == 1
    with pytest.raises(InvalidArgument, match="acquire: the registration cache must be open"):
        cache.lease(part(0, 10))
    lease.close()
    assert "region" not in world.live()
    cache.close()


def test_registration_failure_evicts_idle_regions_and_retries(world, make_cache):
    """What is idle is given up, all of it, and the registration tried once more."""
    cache = make_cache()
    world.set_option("max_pinned_bytes", 10000)
    kept = cache.lease(part(0, 3000))
    use(cache, 4000, 6000)
    use(cache, 8000, 10000)
    with cache.lease(part(20000, 26000)) as lease:
        assert lease.regions[0].pieces
    assert stats(cache, "regions", "evictions") == (2, 2)
    with pytest.raises(OSError, match="RLIMIT_MEMLOCK|out of memory to pin") as caught:
        cache.lease(part(30000, 40000))
    assert caught.value.errno == errno.ENOMEM
    assert stats(cache, "regions", "leased") == (1, 1)
    kept.close()


def test_failed_registration_leaves_nothing_behind(world, make_cache):
    cache = make_cache()
    world.fail("ibv_reg_mr_iova2", errno.EIO)
    with pytest.raises(OSError, match="ibv_reg_mr"):
        cache.lease(part(0, 100))
    assert stats(cache, "regions", "leased", "bytes", "misses") == (0, 0, 0, 1)
    assert use(cache, 0, 100)


def test_externally_closed_region_is_not_reused(world, device, make_cache):
    cache = make_cache()
    use(cache, 0, 100)._handle.close()
    with cache.lease(part(0, 100)) as lease:
        assert lease.regions[0].pieces
    device.close()
    with pytest.raises(InvalidArgument, match="device fake0 must be open, but is closed"):
        cache.lease(part(0, 100))


def test_lease_registers_on_all_nics(world):
    with contextlib.ExitStack() as stack:
        devices = [stack.enter_context(rdma.open(f"fake{i}")) for i in range(3)]
        cache = stack.enter_context(rdma.RegistrationCache(devices))
        with cache.lease(part(0, 100)) as lease:
            assert [region.device.name for region in lease.regions] == ["fake0", "fake1", "fake2"]
        assert stats(cache, "regions", "bytes") == (1, 100)


def test_reallocated_gpu_memory_is_registered_again(world, gpu, make_cache):
    cache = make_cache()
    memory = gpu.allocate(MIB, MIB)
    second = memory.part(MIB, 2 * MIB)
    with cache.lease(memory) as lease:
        key = lease.regions[0].rkey
    with cache.lease(second) as lease:
        assert lease.regions[0].rkey == key
    gpu.reallocate(second)
    with cache.lease(memory.part(5, 10)) as lease:  # of the first mapping, which lives
        assert lease.regions[0].rkey != key
    assert stats(cache, "invalidations", "misses") == (1, 2)


def test_unregistrable_gpu_memory_is_reported(world, gpu, make_cache):
    gpu.set(dmabuf_supported=0)
    cache = make_cache()
    with pytest.raises(Unavailable, match="By nvidia_peermem"):
        cache.lease(gpu.allocate(MIB))
    assert stats(cache, "regions", "leased") == (0, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"access": "all"}, "access must be one of"),
        ({"mapping": "host"}, "mapping must be one of"),
        ({"max_bytes": -1}, "max_bytes must be an integer in 0 to .*, got -1"),
        ({"max_regions": 1.5}, "max_regions must be an integer in 0 to .*, got 1.5"),
        ({"devices": []}, "devices must name at least one, got none"),
    ],
)
def test_error_names_bad_argument(device, change, message):
    with pytest.raises(InvalidArgument, match=message):
        rdma.RegistrationCache(**({"devices": [device]} | change))


def test_read_only_and_empty_memory_cannot_be_leased(make_cache):
    cache = make_cache()
    with pytest.raises(InvalidArgument, match="buffer must be writable, got read-only"):
        cache.lease(b"read-only")
    with pytest.raises(InvalidArgument, match="acquire: buffer must hold at least one byte"):
        cache.lease(torch.zeros(0))
