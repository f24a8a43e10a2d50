"""The registration cache forgets memory when it is freed, and no earlier."""

import array
import gc
import mmap
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mooncake_kernels import rdma
from mooncake_kernels.buffers import Buffer
from mooncake_kernels.rdma import cache as cache_module


@pytest.fixture
def cache(device):
    with rdma.RegistrationCache([device]) as made:
        yield made


OWNERS = {
    "tensor": lambda: torch.zeros(1000),
    "parameter": lambda: torch.nn.Parameter(torch.zeros(1000)),
    "numpy": lambda: np.zeros(1000),
    "numpy of a tensor": lambda: torch.zeros(1000).numpy(),
    "tensor of an array": lambda: torch.from_numpy(np.zeros(1000)),
    "memoryview": lambda: memoryview(np.zeros(1000)),
}


@pytest.mark.parametrize("kind", OWNERS)
def test_freed_memory_is_dropped_from_the_cache(world, cache, kind):
    memory = OWNERS[kind]()
    for _ in range(3):  # it lives: it is found again
        cache.lease(memory).close()
        gc.collect()
    assert cache.stats()["num_misses"] == 1 and cache.stats()["num_hits"] == 2
    del memory
    gc.collect()
    assert cache.stats()["num_regions"] == 0 and "region" not in world.live()


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t[5:],
        lambda t: t.view(torch.uint8)[100:],
        lambda t: t.detach(),
        lambda t: t.numpy()[7:],
        lambda t: t.untyped_storage(),
    ],
)
def test_views_hold_the_memory_of_a_tensor(cache, view):
    """The object that was leased is gone, and so is every other wrapper; a view is not."""
    memory = torch.zeros(1000)
    kept = view(memory)
    cache.lease(memory).close()
    del memory
    gc.collect()
    assert cache.stats()["num_regions"] == 1
    cache.lease(
        np.frombuffer(kept, np.uint8) if isinstance(kept, np.ndarray) else _as_tensor(kept)
    ).close()
    assert cache.stats()["num_hits"] == 1
    del kept
    gc.collect()
    assert cache.stats()["num_regions"] == 0


def _as_tensor(kept):
    if isinstance(kept, torch.UntypedStorage):
        return torch.empty(0).set_(kept)[:10]
    return kept


def test_leased_view_stays_cached_while_its_base_lives(cache):
    memory = np.zeros(1000, np.uint8)
    view = memory[100:200]
    cache.lease(view).close()
    del view
    gc.collect()
    cache.lease(memory[150:160]).close()
    assert cache.stats()["num_hits"] == 1
    del memory
    gc.collect()
    assert cache.stats()["num_regions"] == 0


def test_freed_storage_drops_all_its_regions(cache):
    memory = torch.zeros(1000)
    for begin in range(0, 1000, 100):
        cache.lease(memory[begin : begin + 50]).close()
    assert cache.stats()["num_regions"] == 10
    del memory
    gc.collect()
    assert cache.stats()["num_regions"] == 0


def test_lease_keeps_its_memory_alive(world, cache):
    memory = torch.zeros(1000)
    lease = cache.lease(memory)
    del memory
    gc.collect()
    assert lease.regions[0].pieces and cache.stats()["num_regions"] == 1
    lease.close()
    del lease
    gc.collect()
    assert "region" not in world.live()


def test_unwatchable_memory_is_not_cached(cache):
    """It is registered for its leases alone: it might be freed after them."""
    memory = bytearray(1000)
    with cache.lease(memory), cache.lease(memory):
        assert cache.stats()["num_misses"] == 1
    assert cache.stats()["num_regions"] == 0
    cache.lease(memory).close()
    assert cache.stats()["num_misses"] == 2


def test_dropped_lease_releases_its_region(cache):
    lease = cache.lease(bytearray(1000))
    assert lease.regions
    del lease
    gc.collect()
    assert cache.stats()["num_regions"] == 0


def test_ownerless_memory_needs_explicit_invalidate(cache):
    memory = np.zeros(1000, np.uint8)
    alone = Buffer(memory.ctypes.data, 1000, "cpu:0", True, None)
    cache.lease(alone).close()
    assert cache.stats()["num_regions"] == 1
    assert cache.invalidate(alone) == 1


def test_dropped_cache_releases_its_regions(world, device):
    memory = torch.zeros(1000)
    cache = rdma.RegistrationCache([device])
    cache.lease(memory).close()
    del cache
    gc.collect()
    assert "region" not in world.live()
    assert memory.sum() == 0


def test_closed_cache_ignores_freed_memory(world, device):
    memory = torch.zeros(1000)
    cache = rdma.RegistrationCache([device])
    cache.lease(memory).close()
    cache.close()
    del memory
    gc.collect()
    assert cache.stats()["num_invalidations"] == 0


class Room:
    """Memory that names itself the owner of whatever is asked for, for as long as it lives."""

    def __init__(self, memory: np.ndarray):
        self.memory = memory

    @property
    def buffer(self) -> Buffer:
        return Buffer(self.memory.ctypes.data, self.memory.nbytes, "cpu:0", True, self)


def test_memory_reused_while_first_owner_lives_is_registered_again(cache):
    """As after `mmap.close()`: a closed mapping is not gone, and another may be where it was."""
    memory = np.zeros(8192, np.uint8)
    first, second = Room(memory), Room(memory[4096:])
    cache.lease(first.buffer).close()
    for _ in range(3):
        cache.lease(second.buffer).close()
    assert cache.stats()["num_misses"] == 2 and cache.stats()["num_hits"] == 2
    # Memory that both own, and that was not given out again, is found from then on.
    for room in (first, second, first, second):
        cache.lease(room.buffer).close()
    assert cache.stats()["num_misses"] == 3 and cache.stats()["num_hits"] == 5


def test_unwatched_memory_at_a_cached_address_is_registered_again(cache):
    memory = bytearray(8192)
    alive = Room(np.frombuffer(memory, np.uint8))
    cache.lease(alive.buffer).close()
    cache.lease(memory).close()
    assert cache.stats()["num_misses"] == 2


def test_remapped_address_is_not_a_cache_hit(cache):
    """The kernel tends to map the next one at the same address."""
    kept = []
    for _ in range(3):
        memory = mmap.mmap(-1, 1 << 20)
        cache.lease(memory).close()
        gc.collect()
        memory.close()
        kept.append(memory)
    assert cache.stats()["num_hits"] == 0


def test_growable_array_is_not_cached(cache):
    memory = array.array("d", bytes(8000))
    cache.lease(memory).close()
    assert cache.stats()["num_regions"] == 0


def num_lines(call) -> int:
    """How many lines of the cache's module a call runs."""
    count = 0

    def trace(frame, event, _arg):
        nonlocal count
        if frame.f_code.co_filename != cache_module.__file__:
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("case", ["blocks of a mapping", "with an owner each", "within one leased"])
def test_first_lease_does_not_scan_all_watched_memory(cache, case):
    whole = np.frombuffer(mmap.mmap(-1, 400 * 4096), np.uint8)
    blocks = [whole[i : i + 4096] for i in range(0, whole.nbytes, 4096)]
    if case == "with an owner each":
        rooms = [Room(block) for block in blocks]
        blocks = [room.buffer for room in rooms]
    elif case == "within one leased":
        cache.lease(whole).close()

    def lease(block) -> None:
        cache.lease(block).close()

    lease(blocks[0])
    few = num_lines(lambda: lease(blocks[1]))
    for block in blocks[2:-1]:
        lease(block)
    assert num_lines(lambda: lease(blocks[-1])) < few + 50
    assert len(cache._watched) >= 400


@given(data=st.data())
def test_overlapping_spans_match_linear_scan(data):
    """As a walk of all of them finds it, while some go and come again."""
    spans, model = cache_module._Spans(), []
    sizes = st.integers(0, 12).flatmap(lambda bits: st.integers(1, 1 << bits))
    span = st.tuples(st.integers(0, 3), st.integers(0, 5000), sizes)
    for _ in range(data.draw(st.integers(0, 40))):
        if model and data.draw(st.booleans()):
            gone = data.draw(st.sampled_from(model))
            model.remove(gone)
            spans.gone.append(gone)
        else:
            model.append(data.draw(span))
            spans.add(model[-1])
        _, begin, num_bytes = data.draw(span)
        expected = [s for s in model if s[1] < begin + num_bytes and begin < s[1] + s[2]]
        assert sorted(spans.overlapping(begin, begin + num_bytes)) == sorted(expected)
