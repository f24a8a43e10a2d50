"""The header of packed blocks: malformed, damaged and forged ones are refused."""

import dataclasses
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mooncake_kernels as mk
from mooncake_kernels.kv.pack_header import MAGIC, PREFIX, VERSION

from .layouts import make_view
from .packed import SIZES, sent


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_damaged_header_is_rejected(data):
    src = make_view("nhd_per_layer", SIZES)
    good = mk.Packer(src).header(3).to_bytes()
    assert mk.PackHeader.from_bytes(good).to_bytes() == good
    bad = bytearray(good)
    position = data.draw(st.integers(0, len(good) - 1))
    if data.draw(st.booleans()):
        bad[position] ^= data.draw(st.integers(1, 255))
    else:
        del bad[position:]
    with pytest.raises(mk.InvalidArgument, match="PackHeader: data must"):
        mk.PackHeader.from_bytes(bytes(bad))


@pytest.mark.parametrize(
    "change",
    [
        {"record_bytes": 128},
        {"record_bytes": 1},
        {"chunk_blocks": 0},
        {"num_blocks": -1},
        {"num_blocks": 2.0},
        {"views": ()},
        {"offset": 1},
        {"offset": 1 << 40},
        {"dtype": "float99"},
        {"kv": 3},
        {"heads": 0},
        {"layers": ()},
        {"layers": (1, 1)},
        {"dim": 1 << 61},
        {"axes": "layer kv head dim"},
        {"axes": "layer kv head token"},
        {"axes": "dim layer kv head token"},
        {"axes": "layer kv kv head token dim"},
        {"axes": ["layer", "kv", "head", "token", "dim"]},
    ],
)
def test_forged_header_is_rejected(change):
    """Whoever makes it up can make the CRC fit."""
    view = make_view("nhd_per_layer", SIZES)
    header, staging = sent(mk.Packer(view), [1])
    header = mk.PackHeader.from_bytes(header)
    [[name, _]] = change.items()
    if name in ("offset", "dtype", "kv", "heads", "layers", "dim", "axes"):
        change = {"views": (dataclasses.replace(header.views[0], **change),)}
    lie = dataclasses.replace(header, **change)
    with pytest.raises(mk.InvalidArgument, match="data must describe|data must be a header"):
        mk.PackHeader.from_bytes(lie.to_bytes())
    with pytest.raises(mk.InvalidArgument, match="header must be a PackHeader or its bytes"):
        mk.Packer(view).unpack(lie, staging, [0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_blocks": -1}, "num_blocks must be an integer in 0 to .*, got -1"),
        ({"num_blocks": 1.5}, "num_blocks must be an integer in 0 to .*, got 1.5"),
        ({"num_blocks": 1, "chunk_bytes": 0}, "chunk_bytes must be an integer in 1 to .*, got 0"),
    ],
)
def test_header_rejects_bad_arguments(arguments, message):
    with pytest.raises(mk.InvalidArgument, match=f"Packer.header: {message}"):
        mk.Packer(make_view("nhd_per_layer", SIZES)).header(**arguments)


@pytest.mark.parametrize("body", [b"[" * 100_000, b'{"views":' * 100_000, b"1" * 5000])
def test_header_with_unparsable_body_is_rejected(body):
    data = PREFIX.pack(MAGIC, VERSION, 0, len(body), zlib.crc32(body)) + body
    with pytest.raises(mk.InvalidArgument, match="PackHeader: data must be a header's"):
        mk.PackHeader.from_bytes(data)


@pytest.mark.parametrize("reserved", [1, 0x100, 0xFFFF])
def test_nonzero_reserved_bytes_are_rejected(reserved):
    """What a later version may mean by them must not be lost silently."""
    good = mk.Packer(make_view("nhd_per_layer", SIZES)).header(3).to_bytes()
    bad = good[:6] + reserved.to_bytes(2, "little") + good[8:]
    with pytest.raises(mk.InvalidArgument, match=f"0 in its reserved bytes, got {reserved:#x}"):
        mk.PackHeader.from_bytes(bad)


@pytest.mark.parametrize("data", [None, "MKPK", 7, [1]])
def test_header_that_is_not_bytes_is_rejected(data):
    with pytest.raises(mk.InvalidArgument, match="PackHeader: data must be bytes, got"):
        mk.PackHeader.from_bytes(data)


@pytest.mark.parametrize("change", [{"has_checksums": [1]}, {"has_checksums": 1}])
def test_header_with_non_boolean_flags_is_rejected(change):
    packer = mk.Packer(make_view("nhd_per_layer", SIZES))
    header, staging = sent(packer, [1])
    lying = dataclasses.replace(mk.PackHeader.from_bytes(header), **change)
    for header in (lying, lying.to_bytes()):
        with pytest.raises(mk.InvalidArgument):
            packer.unpack(header, staging, [1])
