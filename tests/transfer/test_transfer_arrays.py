"""Addresses and sizes as arrays of any type: taken unchanged, or refused by name and position."""

import numpy as np
import pytest
import torch

from mooncake_kernels.errors import InvalidArgument

from .support import addressed, engine_pair, untouched

SIZE = 4096
KINDS = {
    "int32": lambda values: np.array(values, np.int32),
    "int64": lambda values: np.array(values, np.int64),
    "uint64": lambda values: np.array(values, np.uint64),
    "uint16": lambda values: np.array(values, np.uint16),
    "big_endian": lambda values: np.array(values, ">i8"),
    "strided": lambda values: np.repeat(np.array(values), 3)[::3],
    "backwards": lambda values: np.array(values[::-1])[::-1],
    "unaligned": lambda values: np.frombuffer(
        b"\0" + np.array(values).tobytes(), np.int64, offset=1
    ),
    "read_only": lambda values: np.frombuffer(np.array(values).tobytes(), np.int64),
    "list": list,
    "tuple": tuple,
    "numbers_of_numpy": lambda values: [np.uint64(value) for value in values],
    "mixed": lambda values: [np.uint64(values[0]), *values[1:]],
    "tensor": torch.tensor,
    "tensor32": lambda values: torch.tensor(values, dtype=torch.int32),
}
SHORT = ("int32", "uint16", "tensor32")  # no room for an address


@pytest.fixture(scope="module")
def pair():
    with engine_pair("local") as engines:
        yield engines


@pytest.mark.parametrize("direction", ["write", "read"])
@pytest.mark.parametrize("kind", KINDS)
def test_all_array_kinds_are_accepted(pair, direction, kind):
    source, target = addressed(SIZE), untouched(SIZE)
    near, far = (source, target) if direction == "write" else (target, source)
    here, there = pair.regions(near, far)
    make = KINDS[kind]
    make_address = np.array if kind in SHORT else make
    offsets, sizes = [700, 0, 90, 3000], [5, 90, 7, 100]
    blocks = (
        make_address([here.address + offset for offset in offsets]),
        make_address([there.address + offset for offset in offsets]),
        make(sizes),
    )
    getattr(pair.near, f"{direction}_blocks")(pair.peer, *blocks).wait()
    expected = untouched(SIZE)
    for offset, size in zip(offsets, sizes, strict=True):
        expected[offset : offset + size] = source[offset : offset + size]
    np.testing.assert_array_equal(target, expected)
    here.close()
    there.close()


@pytest.mark.parametrize("order", ["<", ">", "="])
def test_arrays_of_either_byte_order_are_accepted(pair, order):
    """With one size for all, which the host code takes as it is."""
    source, target = addressed(SIZE), untouched(SIZE)
    here, there = pair.regions(source, target)
    dtype = np.dtype(np.int64).newbyteorder(order)
    where = (np.array([region.address], dtype) for region in (here, there))
    pair.near.write_blocks(pair.peer, *where, SIZE).wait()
    np.testing.assert_array_equal(target, source)
    here.close()
    there.close()


@pytest.mark.parametrize("direction", ["write", "read"])
@pytest.mark.parametrize("argument", ["local_addresses", "remote_addresses", "sizes"])
@pytest.mark.parametrize("kind", ["int32", "int64", "strided", "unaligned", "list", "tensor"])
def test_error_names_negative_number_and_its_index(pair, direction, argument, kind):
    call = getattr(pair.near, f"{direction}_blocks")
    good = {"local_addresses": [8] * 9, "remote_addresses": [8] * 9, "sizes": [1] * 9}
    bad = KINDS[kind]([8, 8, 8, 8, 8, 8, 8, -5, -6])
    message = rf"^{direction}_blocks: {argument}\[7\] must be .* from 0 to 2\*\*64 - 1, got -5$"
    with pytest.raises(InvalidArgument, match=message):
        call(pair.peer, **(good | {argument: bad}))


@pytest.mark.parametrize("argument", ["local_addresses", "remote_addresses", "sizes"])
@pytest.mark.parametrize(
    ("bad", "got"),
    [
        ([1.5], r"\[1.5\]"),
        (np.zeros(1), r"float64 of shape \(1,\)"),
        (np.zeros(1, bool), r"bool of shape \(1,\)"),
        (torch.zeros(1), r"float32 of shape \(1,\)"),
        (["8"], ""),
        ([None], ""),
        ("8", ""),
        ([2**64], r"\[18446744073709551616\]"),
        ([-1, 2**63], ""),
        ([[8]], r"shape \(1, 1\)"),
        (np.int64([[8]]), r"shape \(1, 1\)"),
        ([[8], [8, 8]], ""),
    ],
)
def test_non_integer_arrays_are_rejected(pair, argument, bad, got):
    good = {"local_addresses": [8], "remote_addresses": [8], "sizes": [1]}
    with pytest.raises(InvalidArgument, match=rf"^write_blocks: {argument} must be .*got {got}"):
        pair.near.write_blocks(pair.peer, **(good | {argument: bad}))


def test_addresses_above_2_63_are_shown_unsigned(pair):
    """They are of no region, and shown as what they are."""
    for local in ([2**63 + 8], np.array([2**63 + 8], np.uint64)):
        with pytest.raises(InvalidArgument, match=r"local range 0x80{14}8 \+ 1 bytes is not"):
            pair.near.write_blocks(pair.peer, local, [8], 1)


def test_error_names_empty_block(pair):
    here, there = pair.regions(addressed(64), untouched(64))
    addresses = np.arange(4) * 16
    where = here.address + addresses, there.address + addresses
    with pytest.raises(
        InvalidArgument, match=r"descriptors\[2\] num_bytes must be positive, got 0"
    ):
        pair.near.write_blocks(pair.peer, *where, [1, 2, 0, 4])
    with pytest.raises(
        InvalidArgument, match=r"descriptors\[0\] num_bytes must be positive, got 0"
    ):
        pair.near.write_blocks(pair.peer, *where, 0)
    here.close()
    there.close()
