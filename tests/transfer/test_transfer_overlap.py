"""No two descriptors of a request write the same byte."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_kernels.errors import InvalidArgument

from .support import UNTOUCHED, addressed, engine_pair, untouched

SIZE = 1 << 20


@pytest.fixture(scope="module")
def pair():
    with engine_pair("local") as engines:
        yield engines


@pytest.fixture(scope="module")
def regions(pair):
    return pair.regions(addressed(SIZE), untouched(SIZE))


def overlapping(targets, sizes) -> set[tuple[int, int]]:
    """The loop over all pairs."""
    return {
        (i, j)
        for j in range(len(targets))
        for i in range(j)
        if targets[i] < targets[j] + sizes[j] and targets[j] < targets[i] + sizes[i]
    }


def refused_pair(call, peer, local, remote, sizes) -> tuple[int, int] | None:
    try:
        call(peer, local, remote, sizes).wait()
    except InvalidArgument as error:
        first, second = str(error).split(" must not overlap")[0].split(": ")[1].split(" and ")
        return int(first[12:-1]), int(second[12:-1])
    return None


def check(pair, regions, direction, targets, sizes):
    """Refused if and only if two overlap, naming two that do."""
    near, far = regions
    targets, sizes = np.asarray(targets), np.broadcast_to(sizes, len(targets))
    near._buffer.owner[:], far._buffer.owner[:] = UNTOUCHED, UNTOUCHED
    sources = np.zeros(len(targets), np.int64)  # what is read from may be named again and again
    local, remote = (sources, targets) if direction == "write" else (targets, sources)
    call = pair.near.write_blocks if direction == "write" else pair.near.read_blocks
    expected = overlapping(targets.tolist(), sizes.tolist())
    got = refused_pair(call, pair.peer, near.address + local, far.address + remote, sizes)
    assert (got in expected) if expected else got is None


def places(count, alignment):
    """Where blocks begin: far apart, close together, in order, or not."""
    offsets = st.integers(0, (SIZE - 8192) // alignment).map(lambda k: k * alignment)
    crowded = st.integers(0, 3 * count).map(lambda k: k * alignment)
    lists = st.lists(st.one_of(offsets, crowded), min_size=1, max_size=count)
    return lists.flatmap(lambda all_: st.sampled_from([all_, sorted(all_), sorted(all_)[::-1]]))


@settings(max_examples=100, deadline=None)
@given(
    targets=st.sampled_from([1, 3, 64, 512]).flatmap(lambda alignment: places(40, alignment)),
    size=st.sampled_from([1, 2, 3, 64, 100, 512, 4096, 8191]),
    direction=st.sampled_from(["write", "read"]),
)
def test_blocks_of_one_size(pair, regions, targets, size, direction):
    check(pair, regions, direction, targets, size)


@settings(max_examples=100, deadline=None)
@given(
    blocks=st.lists(st.tuples(st.integers(0, 4000), st.integers(1, 300)), min_size=1, max_size=40),
    direction=st.sampled_from(["write", "read"]),
)
def test_blocks_of_any_sizes(pair, regions, blocks, direction):
    check(pair, regions, direction, *map(list, zip(*blocks, strict=True)))


@pytest.mark.parametrize("alignment", [1, 16, 64])
@pytest.mark.parametrize("sizes", ["one", "any"])
@pytest.mark.parametrize("bad", [False, True])
def test_many_blocks(pair, regions, alignment, sizes, bad):
    """Enough for every way of looking."""
    near, far = regions
    rng = np.random.default_rng(alignment)
    count, cell = 3000, 320
    size = np.full(count, 192) if sizes == "one" else rng.integers(1, 193, count)
    targets = np.arange(count) * cell + rng.integers(0, 128 // alignment + 1, count) * alignment
    order = rng.permutation(count)
    targets, size = targets[order], size[order]
    if bad:
        targets[2900] = targets[17] + size[17] - 1
    expected = near_pairs(targets, size)
    assert ((17, 2900) in expected) == bool(expected) == bad
    got = refused_pair(
        pair.near.write_blocks, pair.peer, np.full(count, near.address), far.address + targets, size
    )
    assert got in expected if bad else got is None


def near_pairs(targets, sizes) -> set[tuple[int, int]]:
    """As ``overlapping``, of those that are neighbours when they are sorted, and the next two."""
    order = np.argsort(targets, kind="stable").tolist()
    pairs = set()
    for step in (1, 2, 3):
        for a, b in zip(order, order[step:], strict=False):
            if targets[b] < targets[a] + sizes[a]:
                pairs.add((min(a, b), max(a, b)))
    return pairs


@pytest.mark.parametrize("direction", ["write", "read"])
def test_overlap_error_names_both_and_moves_nothing(pair, regions, direction):
    near, far = regions
    far._buffer.owner[:] = UNTOUCHED
    near._buffer.owner[:] = addressed(SIZE)
    side, target = ("remote", far) if direction == "write" else ("local", near)
    rows = [(i * 100, i * 200, 100) for i in range(5)] + [(4 * 100 + 60, 4 * 200 + 60, 100)]
    rows = [(near.address + n, far.address + f, size) for n, f, size in rows]
    if direction == "write":
        rows[5] = (near.address + 2000, *rows[5][1:])
    else:
        rows[5] = (rows[5][0], far.address + 2000, 100)
    addresses = [row[1 if direction == "write" else 0] for row in rows]
    message = (
        rf"^{direction}: descriptors\[4\] and descriptors\[5\] must not overlap in {side} memory, "
        rf"got {addresses[4]:#x} \+ 100 bytes and {addresses[5]:#x} \+ 100 bytes$"
    )
    with pytest.raises(InvalidArgument, match=message):
        getattr(pair.near, direction)(pair.peer, rows)
    expected = UNTOUCHED if direction == "write" else addressed(SIZE)
    assert (target._buffer.owner == expected).all()


def test_targets_at_the_end_of_the_address_space(regions):
    """Sums would wrap around; the peer refuses these, and nothing else is wrong with them."""
    with engine_pair("local") as pair:
        near = pair.near.register(addressed(4096))
        remote = np.array([2**64 - 8, 0, 2**64 - 24, 2**63], np.uint64)
        ticket = pair.near.write_blocks(pair.peer, np.full(4, near.address), remote, 16)
        with pytest.raises(Exception, match=r"descriptors\[0\] remote range 0xf{15}8 \+ 16 bytes"):
            ticket.wait()
        remote[1] = 2**64 - 20
        with pytest.raises(InvalidArgument, match=r"descriptors\[1\] and descriptors\[2\] must"):
            pair.near.write_blocks(pair.peer, np.full(4, near.address), remote, 16)
