"""Other threads run while a verb takes its time: two calls of it are inside at once."""

import gc
from functools import partial

import numpy as np

from mooncake_kernels import _host, rdma

from ...threads import in_threads


def at_once(world, verb: str, *calls) -> None:
    """Each call waits within the verb for the others; it fails if they do not come."""

    def run(call) -> None:  # and drop its result, whose destructor may be what is tested
        call()

    world.meet(verb, len(calls))
    in_threads(*(partial(run, call) for call in calls))


def test_port_query_releases_the_gil(world, device):
    at_once(world, "ibv_query_port", device.port, device.port)


def test_borrow_releases_the_gil(world, domain):
    borrowed = []
    borrow = lambda: borrowed.append(_host.rdma_borrow(*domain))  # noqa: E731
    at_once(world, "ibv_query_device", borrow, borrow)
    for device in borrowed:
        device.close()


def test_region_destructor_releases_the_gil(world, device):
    regions = [device.register(bytearray(100)) for _ in range(2)]
    at_once(world, "ibv_dereg_mr", regions.pop, regions.pop)
    assert "region" not in world.live()


def test_queue_pair_destructor_releases_the_gil(world, device):
    pairs = [device.completion_queue(64).queue_pair(max_sends=8) for _ in range(2)]
    at_once(world, "ibv_destroy_qp", pairs.pop, pairs.pop)
    assert "completion queue" not in world.live()


def test_device_destructor_releases_the_gil(world):
    devices = [rdma.open("fake0"), rdma.open("fake1")]
    at_once(world, "ibv_dealloc_pd", devices.pop, devices.pop)
    assert not world.live()


def test_cache_destructor_releases_the_gil(world, device):
    memory = np.zeros(200, np.uint8)
    caches = [rdma.RegistrationCache([device]) for _ in range(2)]
    for cache in caches:
        cache.lease(memory).close()
    del cache
    at_once(world, "ibv_dereg_mr", caches.pop, caches.pop)
    assert "region" not in world.live()


def test_leased_region_outlives_its_python_object(world, device):
    """The cache's registration, which the next lease finds."""
    memory = np.zeros(100, np.uint8)
    with rdma.RegistrationCache([device]) as cache:
        with cache.lease(memory) as lease:
            lease.regions.clear()
            gc.collect()
            assert world.live()["region"] == 1
        with cache.lease(memory) as lease:
            assert lease.regions[0].pieces
        assert cache.stats()["num_hits"] == 1 and world.calls("ibv_reg_mr_iova2") == 1
