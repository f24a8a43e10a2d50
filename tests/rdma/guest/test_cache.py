"""The registration cache on real NICs: what it finds, and what it must not find again."""

import numpy as np
import pytest
import torch

import mooncake_kernels as mk
from mooncake_kernels.rdma import RegistrationCache

from .links import Link, noise


@pytest.fixture
def link():
    with Link() as link:
        yield link


def test_leases_move_bytes(link):
    source, target = noise(100_000), np.zeros(100_000, np.uint8)
    with RegistrationCache([link.a.device]) as here, RegistrationCache([link.b.device]) as there:
        for begin in (0, 50_000, 0):
            with here.lease(source) as from_, there.lease(target[begin:]) as to:
                (local,), (remote,) = from_.regions, to.regions
                rows = [(source.ctypes.data + begin, target.ctypes.data + begin, 50_000)]
                link.a.queue.wait(link.a.pair.write(local, remote.remote, rows))
        assert (source == target).all()
        assert here.stats()["num_misses"] == 1 and here.stats()["num_hits"] == 2
        assert there.stats()["num_regions"] == 1  # what was covered was found


@pytest.mark.parametrize("make", [lambda: np.zeros(8192, np.uint8),
                                  lambda: torch.zeros(8192, dtype=torch.uint8)])  # fmt: skip
def test_freed_memory_is_not_a_cache_hit(link, make):
    with RegistrationCache([link.a.device, link.b.device]) as cache:
        memory = make()
        cache.lease(memory[100:200]).close()
        cache.lease(memory).close()
        assert cache.stats()["num_regions"] == 1
        del memory
        assert cache.stats()["num_regions"] == 0


def test_bounds(link):
    with RegistrationCache([link.a.device], max_bytes=3 * 4096) as cache:
        memories = [np.zeros(4096, np.uint8) for _ in range(5)]
        for memory in memories:
            cache.lease(memory).close()
        stats = cache.stats()
        assert stats["num_regions"] == 3 and stats["num_evictions"] == 2
        leases = [cache.lease(memory) for memory in memories]
        assert cache.stats()["num_regions"] == 5  # all in use
        for lease in leases:
            lease.close()
        assert cache.stats()["num_regions"] == 3


def test_lease_on_a_closed_device_is_rejected(link):
    cache = RegistrationCache([link.a.device])
    memory = np.zeros(100, np.uint8)
    cache.lease(memory).close()
    link.a.device.close()
    with pytest.raises(mk.InvalidArgument, match="must be open, but is closed"):
        cache.lease(np.zeros(100, np.uint8))
    cache.close()
