"""copy_batch: refuses a range that writes what another one reads or writes, and only such."""

import random
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mooncake_kernels as mk

from .batches import check, memory, run


def conflicts(ranges):
    """Pairs of sides, of which one is written, that share a byte."""
    sides = [
        (at, at + size, name, i)
        for i, (src, dst, size) in enumerate(ranges)
        for name, at in (("src", src), ("dst", dst))
        if size > 0
    ]
    return {
        frozenset([(one[2], one[3]), (other[2], other[3])])
        for k, one in enumerate(sides)
        for other in sides[:k]
        if "dst" in (one[2], other[2]) and one[0] < other[1] and other[0] < one[1]
    }


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_overlapping_ranges_are_rejected_and_only_those(data):
    at = st.integers(0, 40).map(lambda i: i * 8 + data.draw(st.sampled_from([0, 0, 3])))
    ranges = data.draw(st.lists(st.tuples(at, at, st.integers(0, 24)), max_size=6))
    cache = torch.arange(400, dtype=torch.int16).to(torch.uint8)
    expected = cache.clone()
    for src, dst, size in ranges:
        expected[dst : dst + size] = cache[src : src + size]
    if not (found := conflicts(ranges)):
        run(cache, cache, ranges, "host")
    else:
        expected = cache.clone()
        with pytest.raises(mk.InvalidArgument, match="copy_batch: dst_ptrs.* overlap") as error:
            run(cache, cache, ranges, "host")
        names = re.findall(r"(src|dst)_ptrs\[(\d+)\]", str(error.value))
        if len(names) == 1:  # of one entry: its own source
            names.append(("src", names[0][1]))
        assert frozenset((name, int(i)) for name, i in names) in found
    assert torch.equal(cache, expected)


@pytest.mark.parametrize("order", ["ascends", "descends", "random"])
@pytest.mark.parametrize("same_memory", [False, True])
def test_single_overlap_among_many_ranges_is_found(engine, order, same_memory):
    count, size = 600, 16
    targets = {"ascends": range(count), "descends": range(count)[::-1]}.get(order)
    targets = list(targets or random.Random(7).sample(range(count), count))
    ranges = [(i * 32, (count + targets[i]) * 32, size) for i in range(count)]
    check(ranges, 2 * count * 32, engine)
    if same_memory:
        ranges[300] = (ranges[450][1] + size - 1, *ranges[300][1:])
        pair = r"dst_ptrs\[450\] must not overlap src_ptrs\[300\]|dst_ptrs\[450\].*300"
    else:
        ranges[300] = (ranges[300][0], ranges[450][1] + size - 1, size)
        pair = r"dst_ptrs\[(300|450)\] must not overlap dst_ptrs\[(300|450)\], the 16 bytes at 0x"
    dst = memory(2 * count * 32 + 64, engine)
    src = dst if same_memory else memory(2 * count * 32 + 64, engine, seed=1)
    with pytest.raises(mk.InvalidArgument, match=f"copy_batch: ({pair})"):
        run(src, dst, ranges, engine)
    assert set(dst.tolist()) == {0x77}


def test_chained_adjacent_ranges_are_rejected(engine):
    cache = memory(64, engine)
    with pytest.raises(mk.InvalidArgument, match=r"dst_ptrs\[0\] must not overlap src_ptrs\[1\]"):
        run(cache, cache, [(0, 16, 16), (16, 32, 16)], engine)
    assert set(cache.tolist()) == {0x77}
