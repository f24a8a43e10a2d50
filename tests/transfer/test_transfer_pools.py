"""Blocks by their ids, of pools with one plane or several."""

import dataclasses
import json
import pickle
import re

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import mooncake_kernels as mk
from mooncake_kernels.errors import InvalidArgument, TransferError
from mooncake_kernels.transfer import take_addresses

from .support import UNTOUCHED, addressed, engine_pair, untouched

SIZE = 1 << 16


def expected_target(source, target, src_pool, dst_pool, src_ids, dst_ids):
    """The loop, over pools whose addresses are offsets."""
    target = target.copy()
    for src_plane, dst_plane in zip(src_pool.planes, dst_pool.planes, strict=True):
        for src_id, dst_id in zip(src_ids, dst_ids, strict=True):
            src = src_plane + int(src_id) * src_pool.stride_bytes
            dst = dst_plane + int(dst_id) * dst_pool.stride_bytes
            target[dst : dst + dst_pool.block_bytes] = source[src : src + src_pool.block_bytes]
    return target


def at(region, pool):
    planes = [region.address + plane for plane in pool.planes]
    return mk.BlockPool(planes, pool.num_blocks, pool.block_bytes, stride_bytes=pool.stride_bytes)


def check(pair, direction, near_pool, far_pool, near_ids, far_ids):
    source, target = addressed(SIZE), untouched(SIZE)
    near, far = (source, target) if direction == "write" else (target, source)
    here, there = pair.regions(near, far)
    forth = (near_pool, far_pool, near_ids, far_ids)
    back = (far_pool, near_pool, far_ids, near_ids)
    expected = expected_target(source, target, *(forth if direction == "write" else back))
    call = getattr(pair.near, f"{direction}_blocks")
    blocks = at(here, near_pool).blocks(near_ids), at(there, far_pool).blocks(far_ids)
    ticket = call(pair.peer, *blocks)
    assert ticket.num_bytes == len(near_ids) * near_pool.block_bytes * len(near_pool.planes)
    ticket.wait()
    np.testing.assert_array_equal(target, expected)
    here.close()
    there.close()


@pytest.mark.parametrize("direction", ["write", "read"])
@pytest.mark.parametrize(
    "make",
    [
        list,
        tuple,
        np.array,
        lambda ids: np.array(ids, np.int32),
        lambda ids: np.array(ids, np.uint64),
        lambda ids: np.array(ids, np.int8),
        lambda ids: np.repeat(np.array(ids), 2)[::2],
        lambda ids: np.array(ids, ">i8"),
        lambda ids: np.frombuffer(b"\0" + np.array(ids).tobytes(), np.int64, offset=1),
        torch.tensor,
        lambda ids: torch.tensor(ids, dtype=torch.int32),
    ],
    ids=["list", "tuple", "int64", "int32", "uint64", "int8", "strided", "big_endian", "unaligned",
         "tensor", "tensor32"],
)  # fmt: skip
def test_ids_of_any_kind(pair, direction, make):
    near_pool = mk.BlockPool([0, 8192], 50, 100, stride_bytes=130)
    far_pool = mk.BlockPool([10_000, 20_000], 40, 100)
    src, dst = [3, 4, 5, 49, 0, 3 if direction == "write" else 9], [7, 8, 9, 0, 39, 20]
    check(pair, direction, near_pool, far_pool, make(src), make(dst))


@st.composite
def pools(draw, block_bytes, num_planes):
    stride = block_bytes + draw(st.integers(0, 40))
    num_blocks = draw(st.integers(1, 30))
    extent = (num_blocks - 1) * stride + block_bytes
    if draw(st.booleans()) and num_planes * block_bytes <= 400:  # planes side by side in a block
        stride = num_planes * block_bytes + draw(st.integers(0, 8))
        planes = [k * block_bytes for k in range(num_planes)]
    else:
        gap = draw(st.integers(0, 9))
        planes = [k * (extent + gap) for k in range(num_planes)]
    planes = draw(st.permutations(planes))
    assume(max(planes) + (num_blocks - 1) * stride + block_bytes <= SIZE)
    return mk.BlockPool(planes, num_blocks, block_bytes, stride_bytes=stride)


@st.composite
def moves(draw):
    block_bytes, num_planes = draw(st.integers(1, 300)), draw(st.integers(1, 5))
    src, dst = (draw(pools(block_bytes, num_planes)) for _ in range(2))
    dst_ids = draw(st.lists(st.integers(0, dst.num_blocks - 1), min_size=1, unique=True))
    if draw(st.booleans()):
        dst_ids.sort()
    start = draw(st.integers(0, src.num_blocks - 1))
    src_ids = [(start + k) % src.num_blocks for k in range(len(dst_ids))]
    return src, dst, src_ids, dst_ids


@pytest.mark.parametrize("transport", ["local", "shm", "tcp"])
def test_any_pools(transport):
    with engine_pair(transport) as pair:

        @given(case=moves(), direction=st.sampled_from(["write", "read"]))
        @settings(max_examples=30, deadline=None)
        def run(case, direction):
            src_pool, dst_pool, src_ids, dst_ids = case
            if direction == "write":
                check(pair, direction, src_pool, dst_pool, src_ids, dst_ids)
            else:
                check(pair, direction, dst_pool, src_pool, dst_ids, src_ids)

        run()


@st.composite
def any_planes(draw):
    block_bytes = draw(st.integers(1, 12))
    stride = block_bytes + draw(st.integers(0, 24))
    planes = draw(st.lists(st.integers(0, 150), min_size=1, max_size=5))
    return planes, draw(st.integers(1, 6)), block_bytes, stride


@given(any_planes())
@settings(max_examples=150, deadline=None)
def test_planes_that_overlap_are_refused(case):
    planes, num_blocks, block_bytes, stride = case
    starts = [p + i * stride for p in planes for i in range(num_blocks)]
    taken = {start + k for start in starts for k in range(block_bytes)}
    if len(taken) == len(starts) * block_bytes:
        pool = mk.BlockPool(planes, num_blocks, block_bytes, stride_bytes=stride)
        assert pool.planes == tuple(planes)
    else:
        with pytest.raises(InvalidArgument, match="BlockPool: planes must not overlap, got planes"):
            mk.BlockPool(planes, num_blocks, block_bytes, stride_bytes=stride)


@pytest.mark.parametrize("make", [list, tuple, np.array, torch.tensor])
def test_planes_of_any_kind(make):
    assert mk.BlockPool(make([4096, 8192]), 2, 64).planes == (4096, 8192)


def test_block_pool_survives_pickle_and_json():
    pool = mk.BlockPool([4096, 1 << 60], 10, 64, stride_bytes=96)
    assert pickle.loads(pickle.dumps(pool)) == pool
    assert mk.BlockPool(**json.loads(json.dumps(dataclasses.asdict(pool)))) == pool
    assert mk.BlockPool(np.array([4096, 8192]), np.int64(3), np.int32(8)).planes == (4096, 8192)
    assert mk.BlockPool(4096, 10, 64) == mk.BlockPool([4096], 10, 64, stride_bytes=64)


def test_using_a_block_pool_leaves_it_unchanged(pair, blocks):
    near, far = map(dataclasses.replace, blocks)
    before = [(pickle.dumps(pool), dict(vars(pool))) for pool in (near, far)]
    pair.near.write_blocks(pair.peer, near.blocks([1]), far.blocks([2])).wait()
    assert [(pickle.dumps(pool), vars(pool)) for pool in (near, far)] == before
    assert mk.BlockPool(**vars(near)) == near


def test_regions_as_planes(pair):
    near, far = pair.regions(addressed(4096), untouched(4096))
    src, dst = mk.BlockPool(near, 64, 64), mk.BlockPool([far], 64, 64)
    assert (src.planes, dst.planes) == ((near.address,), (far.address,))
    pair.near.write_blocks(pair.peer, src.blocks(range(64)), dst.blocks(range(64))).wait()
    np.testing.assert_array_equal(far._buffer.owner, near._buffer.owner)
    with pytest.raises(InvalidArgument, match=r"planes\[1\] must be a region of at least 4160 by"):
        mk.BlockPool([0, near], 65, 64)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], 1, 1), "planes must be at least one address, got none"),
        ((b"abc", 1, 1), r"planes must be \[n\] addresses or one, got bytes"),
        ((np.zeros((2, 2), int), 1, 1), r"planes must be \[n\] addresses or one, got 2 dimensions"),
        ((-1, 1, 1), r"planes\[0\] must be an integer in 0 to 18446744073709551615, got -1"),
        (([0, "x"], 1, 1), r"planes\[1\] must be an integer in 0 to .*, got 'x'"),
        ((2**64 - 4, 1, 8), rf"planes\[0\] must be an integer in 0 to {2**64 - 8}, got"),
        ((0, 0, 1), "num_blocks must be an integer in 1 to .*, got 0"),
        ((0, 1.5, 1), "num_blocks must be an integer in 1 to .*, got 1.5"),
        ((0, True, 1), "num_blocks must be an integer in 1 to .*, got True"),
        ((0, 1, 0), "block_bytes must be an integer in 1 to .*, got 0"),
        ((0, 1, 8, 7), "stride_bytes must be an integer in 8 to .*, got 7"),
        ((0, 2**40, 2**40), "the pool must end below 2\\*\\*64, got"),
    ],
)
def test_bad_pools(arguments, message):
    *positional, stride = arguments if len(arguments) == 4 else (*arguments, None)
    with pytest.raises(InvalidArgument, match=f"^BlockPool: {message}"):
        mk.BlockPool(*positional, stride_bytes=stride)


@pytest.fixture
def blocks(pair):
    """Pools of 10 blocks at either end."""
    near, far = pair.regions(addressed(1280), untouched(1280))
    return mk.BlockPool(near, 10, 64), mk.BlockPool(far, 10, 64)


@pytest.mark.parametrize("direction", ["write", "read"])
@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint64])
@pytest.mark.parametrize(
    ("near_ids", "far_ids", "message"),
    [
        ([0, 1, 10], [0, 1, 2], r"local ids\[2\] must be from 0 to 9, got 10"),
        ([0, 1, 2], [0, 1000, 11], r"remote ids\[1\] must be from 0 to 9, got 1000"),
        ([0, -1, 2], [0, 1, 2], r"local ids\[1\] must be from 0 to 9, got -1"),
        ([0, 1, 2], [0, 1, -7], r"remote ids\[2\] must be from 0 to 9, got -7"),
        ([0, 1, 2], [0, 1], "the ids must be equally many, got 3 and 2"),
    ],
)
def test_bad_ids(pair, blocks, direction, dtype, near_ids, far_ids, message):
    near_ids, far_ids = np.array(near_ids), np.array(far_ids)
    if dtype == np.uint64 and min(near_ids.min(), far_ids.min()) < 0:
        message = re.sub("got -.*", r"got 1844674407370955\\d+", message)
    call = getattr(pair.near, f"{direction}_blocks")
    ids = [near_ids.astype(dtype), far_ids.astype(dtype)]
    with pytest.raises(InvalidArgument, match=f"^{direction}_blocks: {message}$"):
        call(pair.peer, blocks[0].blocks(ids[0]), blocks[1].blocks(ids[1]))
    with pytest.raises(InvalidArgument, match=f"^{direction}_blocks: "):
        call(pair.peer, blocks[0].blocks(ids[0].tolist()), blocks[1].blocks(ids[1].tolist()))


def test_duplicate_target_ids_are_rejected(pair, blocks):
    near, far = blocks
    message = r"^write_blocks: remote ids\[1\] and ids\[3\] must differ, .*, got 7 twice$"
    with pytest.raises(InvalidArgument, match=message):
        pair.near.write_blocks(pair.peer, near.blocks([0, 1, 2, 3]), far.blocks([5, 7, 1, 7]))
    with pytest.raises(InvalidArgument, match=r"^read_blocks: local ids\[0\] and ids\[2\] must d"):
        pair.near.read_blocks(pair.peer, near.blocks([9, 1, 9]), far.blocks([5, 7, 1]))
    pair.near.write_blocks(pair.peer, near.blocks([4, 4]), far.blocks([0, 1])).wait()
    pair.near.read_blocks(pair.peer, near.blocks([0, 1]), far.blocks([4, 4])).wait()


def test_mismatched_pools_are_rejected(pair, blocks):
    near, far = blocks
    write, some = pair.near.write_blocks, [0, 1]
    here, there = near.blocks(some), far.blocks(some)
    with pytest.raises(InvalidArgument, match="pools must have blocks of one size, got 64 and 32"):
        write(pair.peer, here, mk.BlockPool(far.planes, 10, 32).blocks(some))
    with pytest.raises(InvalidArgument, match="pools must have equally many planes, got 1 and 2"):
        planes = [far.planes[0], far.planes[0] + 640]
        write(pair.peer, here, mk.BlockPool(planes, 10, 64).blocks(some))
    with pytest.raises(InvalidArgument, match="must both be .* arrays, got Blocks and list"):
        write(pair.peer, here, [1, 2], 64)
    with pytest.raises(InvalidArgument, match="must both be .* arrays, got list and Blocks"):
        write(pair.peer, [1, 2], there)
    with pytest.raises(InvalidArgument, match="sizes must be None for blocks of pools, got 64"):
        write(pair.peer, here, there, 64)
    for sizes in (None, 64):  # whatever else is wrong
        with pytest.raises(InvalidArgument, match="must both be .* arrays, got Blocks and list"):
            write(pair.peer, here, [1, 2], sizes, notify="text")
    with pytest.raises(InvalidArgument, match="sizes must be None for blocks of pools, got 64"):
        write(None, here, there, 64, checksum=1)
    with pytest.raises(InvalidArgument, match=r"^write_blocks: sizes must be .*, got None"):
        write(pair.peer, [1], [2])
    with pytest.raises(InvalidArgument, match="write_blocks: descriptors must not be empty"):
        write(pair.peer, near.blocks([]), far.blocks([]))
    for ids in ([[1]], np.zeros((2, 2), int), 5):
        with pytest.raises(InvalidArgument, match=r"^blocks: ids must be \[n\] .*, got shape"):
            near.blocks(ids)
    for ids in ([0.5], "ab", None, np.zeros(3), torch.zeros(2)):
        with pytest.raises(InvalidArgument, match=r"^blocks: ids must be \[n\] integers"):
            near.blocks(ids)
    assert (pair.far.receive_notifications(), near.blocks([1]).pool) == ([], near)


def test_pool_unregistered_at_the_peer_is_refused(pair, blocks):
    """Block i of plane p is ``descriptors[p * n + i]``."""
    near, far = blocks
    two = mk.BlockPool([near.planes[0], near.planes[0] + 640], 10, 64)
    there = mk.BlockPool([far.planes[0], far.planes[0] + 700], 10, 64)
    ticket = pair.near.write_blocks(pair.peer, two.blocks([3, 1, 9]), there.blocks([3, 1, 9]))
    address = there.planes[1] + 9 * 64
    with pytest.raises(TransferError, match=rf"descriptors\[5\] remote range {address:#x} \+ 64"):
        ticket.wait()
    with pytest.raises(InvalidArgument, match=r"write_blocks: descriptors\[2\] local range"):
        beyond = mk.BlockPool([near.planes[0], near.planes[0] + 1280], 10, 64)
        pair.near.write_blocks(pair.peer, beyond.blocks([0, 1]), there.blocks([0, 1]))
    [region] = pair.far._regions
    assert (region._buffer.owner == UNTOUCHED).all()


def test_partially_registered_pool(pair):
    """A block must be inside a region, whatever the pool is."""
    source, target = addressed(1920), untouched(1920)
    here, there = pair.regions(source[:640], target)
    with here, there, pair.near.register(source[640:1280]):
        near, far = (mk.BlockPool(region.address, 30, 64) for region in (here, there))
        with pytest.raises(InvalidArgument, match=r"write_blocks: descriptors\[2\] local range"):
            pair.near.write_blocks(pair.peer, near.blocks([9, 10, 20]), far.blocks([9, 10, 11]))
        assert (target == UNTOUCHED).all()
        pair.near.write_blocks(pair.peer, near.blocks([9, 10, 19]), far.blocks([9, 10, 11])).wait()
    np.testing.assert_array_equal(target[576:704], source[576:704])
    np.testing.assert_array_equal(target[704:768], source[1216:1280])


@pytest.mark.parametrize("make", [list, tuple, np.array, torch.tensor])
@pytest.mark.parametrize("indices", [[], [4], [2, 0, 2]])
def test_addresses_that_are_taken(indices, make):
    addresses = np.array([1 << 63, 7, (1 << 64) - 1, 0, 40], np.uint64)
    taken = take_addresses(addresses, make(indices))
    assert taken.dtype == np.uint64 and taken.tolist() == [int(addresses[i]) for i in indices]


@pytest.mark.parametrize("dtype", [np.int8, np.uint16, np.int32, np.int64, ">i8", np.uint64])
@pytest.mark.parametrize("step", [1, 2])
def test_indices_of_any_integers(dtype, step):
    addresses = np.arange(100, 200, dtype=np.uint64)
    indices = np.array([99, 0, 5, 7], dtype)[::step]
    expected = [199, 100, 105, 107][::step]
    assert take_addresses(addresses, indices).tolist() == expected
    assert take_addresses(addresses.astype(np.int32), indices).tolist() == expected


@pytest.mark.parametrize(
    ("addresses", "indices", "message"),
    [
        ([5, 6], [0, 2], "indices must be from 0 to 1, got 2 at 1"),
        ([5, 6], np.array([-1]), "indices must be from 0 to 1, got -1 at 0"),
        ([5, 6], np.array([-1], np.int32), "indices must be from 0 to 1, got -1 at 0"),
        ([5, 6], np.array([1 << 63], np.uint64), f"got {1 << 63} at 0"),
        ([5, 6], [0.5], r"indices must be \[n\] integers"),
        ([5, 6], [[0]], r"indices must be \[n\] integers"),
        ([5, -6], [0], r"addresses must be \[m\] integers"),
        ([[5]], [0], r"addresses must be \[m\] integers"),
    ],
)
def test_wrong_addresses_to_take(addresses, indices, message):
    with pytest.raises(InvalidArgument, match=f"^take_addresses: .*{message}"):
        take_addresses(np.array(addresses), indices)
