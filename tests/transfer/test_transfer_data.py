"""Transfers move bytes: every comparison is exact, and each byte identifies its source."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ..threads import in_threads
from .support import addressed, engine_pair, untouched

MIB = 1 << 20


def move(pair, direction, near, far, blocks, **options):
    """Run one request of (near_offset, far_offset, num_bytes) blocks over registered memory."""
    near_region, far_region = pair.regions(near, far)
    rows = [(near_region.address + n, far_region.address + f, size) for n, f, size in blocks]
    ticket = getattr(pair.near, direction)(pair.peer, rows, **options)
    assert ticket.num_bytes == sum(size for _, _, size in blocks)
    ticket.wait()
    assert ticket.done
    near_region.close()
    far_region.close()


def check(pair, direction, num_bytes, blocks):
    """Compare with the loop of the docstring, on both sides."""
    near, far = addressed(num_bytes), untouched(num_bytes)
    if direction == "read":
        near, far = far, near
    want_near, want_far = near.copy(), far.copy()
    for n, f, size in blocks:
        if direction == "write":
            want_far[f : f + size] = want_near[n : n + size]
        else:
            want_near[n : n + size] = want_far[f : f + size]
    move(pair, direction, near, far, blocks)
    np.testing.assert_array_equal(near, want_near)
    np.testing.assert_array_equal(far, want_far)


@pytest.mark.parametrize("direction", ["write", "read"])
def test_blocks_scattered_over_several_batches(pair, direction):
    order = np.random.default_rng(1).permutation(2048)
    blocks = [(i * 16384, int(order[i]) * 16384, 16384) for i in range(2048)]
    check(pair, direction, 32 * MIB, blocks)


@pytest.mark.parametrize("direction", ["write", "read"])
def test_100_000_small_blocks(pair, direction):
    count, size = 100_000, 64
    order = np.random.default_rng(2).permutation(count)
    source, target = addressed(count * size), untouched(count * size)
    near, far = (source, target) if direction == "write" else (target, source)
    near_region, far_region = pair.regions(near, far)
    blocks = near_region.address + np.arange(count) * size, far_region.address + order * size, size
    getattr(pair.near, f"{direction}_blocks")(pair.peer, *blocks).wait()
    near_blocks, far_blocks = near.reshape(count, size), far.reshape(count, size)
    np.testing.assert_array_equal(far_blocks[order], near_blocks)


def test_range_across_adjacent_regions_takes_two_descriptors(pair):
    near, far = addressed(64), untouched(64)
    here = pair.near.register(near)
    left, right = pair.far.register(far[:32]), pair.far.register(far[32:])
    rows = [(here.address, left.address, 32), (here.address + 32, right.address, 32)]
    pair.near.write(pair.peer, rows).wait()
    np.testing.assert_array_equal(far, near)


def test_local_overlapping_copy_behaves_like_memmove():
    memory = addressed(24 * MIB)
    for shift in (-(1 * MIB + 3), 1 * MIB + 3):
        with engine_pair("local") as pair, pair.far.open(pair.far.name) as itself:
            region = pair.far.register(memory)
            src, dst = max(0, -shift), max(0, shift)
            size = memory.nbytes - abs(shift)
            want = memory.copy()
            want[dst : dst + size] = memory[src : src + size]
            rows = [(region.address + src, region.address + dst, size)]
            pair.far.write(itself, rows).wait()
            np.testing.assert_array_equal(memory, want)


def test_requests_from_many_threads(pair):
    num_threads, num_rounds, size = 8, 20, 10_000
    near, far = addressed(num_threads * size), untouched(num_threads * size)
    near_region, far_region = pair.regions(near, far)

    def work(index):
        row = (near_region.address + index * size, far_region.address + index * size, size)
        for _ in range(num_rounds):
            pair.near.write(pair.peer, [row]).wait()
            pair.near.read(pair.peer, [row]).wait()

    in_threads(*(partial(work, each) for each in range(num_threads)))
    np.testing.assert_array_equal(far, near)
    np.testing.assert_array_equal(near, addressed(num_threads * size))


@st.composite
def disjoint_blocks(draw):
    """Blocks that overlap on neither side, in any order, some of them neighbours."""
    sizes = draw(st.lists(st.integers(1, 300), min_size=1, max_size=40))
    gaps = draw(st.lists(st.integers(0, 3), min_size=len(sizes), max_size=len(sizes)))
    order = draw(st.permutations(range(len(sizes))))
    near = np.cumsum([0, *(s + g for s, g in zip(sizes, gaps, strict=True))])
    far, position = {}, 0
    for i in order:
        far[i] = position
        position += sizes[i] + gaps[i] // 2
    return int(near[-1]), [(int(near[i]), far[i], sizes[i]) for i in range(len(sizes))]


@pytest.mark.parametrize("transport", ["local", "shm", "tcp"])
def test_any_blocks(transport):
    with engine_pair(transport) as pair:

        @given(case=disjoint_blocks(), direction=st.sampled_from(["write", "read"]))
        @settings(max_examples=25, deadline=None)
        def run(case, direction):
            check(pair, direction, *case)

        run()
