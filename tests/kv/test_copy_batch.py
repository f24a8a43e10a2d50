"""copy_batch: ranges by their addresses, bitwise, against the loop in its docstring."""

import random
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mooncake_kernels as mk

from .batches import GPU_ENGINES, check, memory


@pytest.mark.parametrize("size", [1, 3, 4, 15, 16, 64, 100, 656, 4096, 4100, 70_001])
@pytest.mark.parametrize("offset", [0, 1, 4, 8])
def test_every_size_and_alignment(engine, size, offset):
    step = size + 13 - (size + 13) % 16 + 16
    ranges = [(i * step + offset, (5 - i) * step, size) for i in range(6)]
    for src_on_gpu, dst_on_gpu in product(
        *[[False, True]] * 2 if engine in GPU_ENGINES else [[False]] * 2
    ):
        check(ranges, 8 * step, engine, src_on_gpu, dst_on_gpu)


@pytest.mark.parametrize("num_ranges", [0, 1, 999, 1000, 1001, 2500])
@pytest.mark.parametrize("max_sms", [None, 2])
def test_more_ranges_than_one_launch_takes(engine, num_ranges, max_sms):
    order = random.Random(num_ranges).sample(range(num_ranges), num_ranges)
    ranges = [(place * 96, i * 96 + 32, 48) for i, place in enumerate(order)]
    check(ranges, 96 * num_ranges + 96, engine, dst_on_gpu=True, max_sms=max_sms)


def test_copies_a_mix_of_tiny_and_large_ranges(engine):
    """12 MB, from one byte to 3 MB: a thread begins and ends within a range."""
    chosen = random.Random(5)
    ranges, src, dst = [], 0, 0
    for size in [3 << 20, 1, 4096, 4096, 0, 1 << 20, 17, *[1 << 16] * 40, 5_000_000]:
        ranges.append((src, dst, size))
        src, dst = src + size + chosen.choice([0, 64]), dst + size + chosen.choice([0, 3])
    check(ranges, 14 << 20, engine, src_on_gpu=True)


def test_adjacent_ranges_are_merged(engine):
    """16 KiB in pieces of 16 bytes, then a piece that goes on for src alone, and for dst alone."""
    ranges = [(i * 16, 32 + i * 16, 16) for i in range(1024)]
    ranges += [(16384, 20000, 16), (18000, 20016, 16), (18016, 21000, 16)]
    check(ranges, 1 << 15, engine, dst_on_gpu=True)


def test_sizes_of_zero_are_skipped_whatever_their_addresses(engine):
    dst = memory(16, engine)
    zero = torch.zeros(3, dtype=torch.int64)
    mk.copy_batch(zero - 5, zero, zero, engine=engine)
    assert set(dst.tolist()) == {0x77}


def test_strided_address_columns_and_source_order_flag(engine):
    src, dst = memory(64, engine, seed=3), memory(64, engine)
    table = torch.tensor([[src.data_ptr(), dst.data_ptr() + 8, 9]] * 2)
    if engine == "copy_engine":
        with torch.cuda.stream(torch.cuda.Stream()) as _:
            mk.copy_batch(*table[:1].unbind(1), True, engine=engine)
            torch.cuda.current_stream().synchronize()
    else:
        mk.copy_batch(table[::2, 0], table[::2, 1], table[::2, 2], True, engine=engine)
        if engine == "cuda":
            torch.cuda.synchronize()
    assert torch.equal(dst[8:17], src[:9])
    assert dst[17] == 0x77


@given(data=st.data())
@settings(max_examples=80, deadline=None)
def test_any_list_of_ranges_matches_the_loop(data):
    """Ranges that follow each other with gaps or without, in any order."""
    sizes = data.draw(st.lists(st.integers(0, 300), max_size=12))
    gaps = st.lists(st.sampled_from([0, 0, 1, 64]), min_size=len(sizes), max_size=len(sizes))
    ranges, src, dst = [], 0, 0
    for size, src_gap, dst_gap in zip(sizes, data.draw(gaps), data.draw(gaps), strict=True):
        ranges.append((src + src_gap, dst + dst_gap, size))
        src, dst = src + src_gap + size, dst + dst_gap + size
    check(data.draw(st.permutations(ranges)), src + dst + 1, "host")
