"""The registration cache from many threads, and against a model."""

import contextlib
import errno
import random
import threading
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_kernels import InvalidArgument, rdma
from mooncake_kernels.buffers import Buffer

from ...threads import in_threads

MEMORY = np.zeros(1 << 14, np.uint8)
BASE = MEMORY.ctypes.data
RANGES = st.tuples(st.integers(0, 60), st.integers(1, 30))


def part(begin: int, size: int) -> Buffer:
    return Buffer(BASE + begin, size, "cpu:0", True, None)


@dataclass(eq=False)
class Entry:
    begin: int
    end: int
    num_leases: int = 0
    listed: bool = True


class Model:
    """What the cache must hold. A range that several cover is found in the one that begins last."""

    def __init__(self, max_regions: int, max_bytes: int):
        self.bounds = max_regions, max_bytes
        self.entries: list[Entry] = []
        self.idle: list[Entry] = []  # the least recently used first

    def lease(self, begin: int, end: int) -> tuple[Entry, bool]:
        covering = [e for e in self.entries if e.listed and e.begin <= begin and end <= e.end]
        found = max(covering, key=lambda e: e.begin, default=None)
        if found is None:
            for held in [e for e in self.entries if begin <= e.begin and e.end <= end]:
                self.drop(held)
            self.make_room(1, end - begin)
            self.entries.append(Entry(begin, end))
        entry = found or self.entries[-1]
        entry.num_leases += 1
        if entry in self.idle:
            self.idle.remove(entry)
        return entry, found is not None

    def release(self, entry: Entry) -> None:
        entry.num_leases -= 1
        if entry.num_leases:
            return
        if entry.listed:
            self.idle.append(entry)
            self.make_room(0, 0)
        else:
            self.entries.remove(entry)

    def invalidate(self, begin: int, end: int) -> int:
        hit = [e for e in self.entries if e.listed and e.begin < end and begin < e.end]
        for entry in hit:
            self.drop(entry)
        return len(hit)

    def drop(self, entry: Entry) -> None:
        entry.listed = False
        if not entry.num_leases:
            self.idle.remove(entry)
            self.entries.remove(entry)

    def make_room(self, num_regions: int, num_bytes: int) -> None:
        while self.idle and (
            len(self.entries) + num_regions > self.bounds[0]
            or self.num_bytes() + num_bytes > self.bounds[1]
        ):
            self.drop(self.idle[0])

    def num_bytes(self) -> int:
        return sum(entry.end - entry.begin for entry in self.entries)


@given(
    steps=st.lists(st.tuples(st.sampled_from(["lease", "end", "invalidate"]), RANGES), max_size=50),
    max_regions=st.integers(0, 5),
    max_bytes=st.integers(0, 120),
)
@settings(max_examples=200)
def test_cache_matches_its_model(world, steps, max_regions, max_bytes):
    model, leases = Model(max_regions, max_bytes), []
    bounds = {"max_regions": max_regions, "max_bytes": max_bytes}
    with rdma.open("fake0") as device, rdma.RegistrationCache([device], **bounds) as cache:
        for what, (begin, size) in steps:
            if what == "lease":
                num_hits = cache.stats()["num_hits"]
                lease = cache.lease(part(begin, size))
                entry, hit = model.lease(begin, begin + size)
                leases.append((lease, entry))
                assert cache.stats()["num_hits"] - num_hits == hit
            elif what == "end" and leases:
                lease, entry = leases.pop(begin % len(leases))
                lease.close()
                model.release(entry)
            elif what == "invalidate":
                hit = model.invalidate(begin, begin + size)
                assert cache.invalidate(part(begin, size)) == hit
            for lease, entry in leases:
                [region] = lease.regions
                assert region.pieces
                assert (region.address, region.num_bytes) == (
                    BASE + entry.begin,
                    entry.end - entry.begin,
                )
            stats = cache.stats()
            assert stats["num_regions"] == len(model.entries) == world.live().get("region", 0)
            assert stats["num_bytes"] == model.num_bytes()
            assert stats["num_leased"] == len({id(entry) for _, entry in leases})
        for lease, _ in leases:
            lease.close()
    world.check()


def test_concurrent_leases_register_once(world, device):
    """The first is delayed within the verb, so that the others come upon it."""
    world.delay("ibv_reg_mr_iova2", 20_000)
    with rdma.RegistrationCache([device]) as cache:
        start, keys = threading.Barrier(6), []

        def ask():
            start.wait()
            with cache.lease(part(0, 1000)) as lease:
                keys.append(lease.regions[0].rkey)

        in_threads(*[ask] * 6)
        assert len(keys) == 6 and len(set(keys)) == 1
        assert world.calls("ibv_reg_mr_iova2") == 1


def test_waiters_retry_a_failed_registration(world, device):
    world.fail("ibv_reg_mr_iova2", errno.EIO, count=2)
    with rdma.RegistrationCache([device]) as cache:
        start, ends = threading.Barrier(4), []

        def ask():
            start.wait()
            try:
                cache.lease(part(0, 1000)).close()
                ends.append("leased")
            except OSError:
                ends.append("failed")

        in_threads(*[ask] * 4)
        assert sorted(ends) == ["failed", "failed", "leased", "leased"]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("ending", ["all done", "closed"])
def test_many_threads_always_lease_valid_regions(world, device, seed, ending):
    """Whoever holds a lease has a region that covers its range and that is registered."""
    cache = rdma.RegistrationCache([device], max_regions=6, max_bytes=4000)
    wrong, stop = [], threading.Event()

    def work(number: int) -> None:
        choose = random.Random(100 * seed + number)
        for _ in range(200):
            begin, size = choose.randrange(8000), choose.randrange(1, 3000)
            if choose.random() < 0.2:
                cache.invalidate(part(begin, size))
                continue
            with cache.lease(part(begin, size)) as lease:
                region = lease.regions[0]
                covers = (
                    region.address <= BASE + begin
                    and BASE + begin + size <= region.address + region.num_bytes
                )
                if not (covers and region.pieces):
                    wrong.append((begin, size))

    def guarded(number: int) -> None:
        with contextlib.suppress(InvalidArgument):
            work(number)

    threads = [threading.Thread(target=guarded, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    if ending == "closed":
        stop.wait(0.02)
        cache.close()
    for thread in threads:
        thread.join()
    assert wrong == []
    stats = cache.stats()
    assert stats["num_leased"] == 0 and stats["num_regions"] == world.live().get("region", 0)
    assert stats["num_regions"] <= 6 and stats["num_bytes"] <= 4000
    cache.close()
    assert "region" not in world.live() and cache.stats()["num_bytes"] == 0
