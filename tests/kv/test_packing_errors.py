"""Packing and unpacking wrong input: nothing is written, and the message names the error."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mooncake_kernels as mk
from mooncake_kernels.kv.packing import without_right_ones

from .layouts import Sizes, make_view, snapshot
from .packed import HOLE, SIZES, sent, staging_of

pytestmark = pytest.mark.usefixtures("not_triton")


def other(**sizes):
    return make_view("nhd_per_layer", dataclasses.replace(SIZES, **sizes))


@pytest.mark.parametrize(
    ("dst", "message"),
    [
        (lambda: other(dim=4), "header must have the cache's dim 4, got 8"),
        (lambda: other(kv=1), "header must have the cache's kv 1, got 2"),
        (
            lambda: make_view("nhd_per_layer", SIZES, dtype=torch.bfloat16),
            "header must have the cache's dtype torch.bfloat16, got torch.float16",
        ),
        (lambda: [other(), other()], "header must have 2 views, got 1"),
    ],
)
def test_unpack_rejects_an_incompatible_cache(dst, message):
    packed = sent(mk.Packer(make_view("hnd_per_layer", SIZES)), [1])
    with pytest.raises(mk.InvalidArgument, match=f"Packer.unpack: {message}"):
        mk.Packer(dst()).unpack(*packed, [0])


def freed_staging(packer):
    staging = staging_of(packer)
    staging.untyped_storage().resize_(0)
    return staging


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: p.pack([0, 6], staging_of(p)), r"block_ids\[1\] must be .* \[0, 6\), got 6"),
        (lambda p: p.pack([0, 0.5], staging_of(p)), "block_ids must be 1-d int32 or int64"),
        (lambda p: p.pack([0, 1], [1]), "staging must be a 1-d uint8 tensor, got list"),
        (lambda p: p.pack([0], torch.zeros(9)), "staging must be a 1-d uint8 tensor, got torch.fl"),
        (lambda p: p.pack([0, 1], staging_of(p)[1:]), r"staging must have \d+ bytes for 2 blocks"),
        (lambda p: p.pack([0], staging_of(p)[1:]), "staging must begin at a multiple of 16 bytes"),
        (lambda p: p.pack([0], staging_of(p, 9)[::2]), "staging must be packed"),
        (lambda p: p.pack([0], freed_staging(p)), "staging must have memory"),
        (
            lambda p: p.pack([0, 1], staging_of(p), chunk_bytes=1, ready=mk.LayerStream(1)),
            "ready must be a LayerStream of 2 layers, one a chunk, got 1",
        ),
        (lambda p: p.pack([0], staging_of(p), max_sms=0), "max_sms must be None or an integer"),
    ],
)
def test_pack_rejects_bad_calls(call, message):
    with pytest.raises(mk.InvalidArgument, match=f"Packer.pack: {message}"):
        call(mk.Packer(make_view("nhd_per_layer", SIZES)))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p, h, s: p.unpack(h, s, [0, 7]), r"block_ids\[1\] must be .* \[0, 6\), got 7"),
        (
            lambda p, h, s: p.unpack(h, s, [0]),
            r"block_ids must have as many ids as staging's records \(2\), got 1",
        ),
        (lambda p, h, s: p.unpack(h, s[:-1], [0, 1]), r"staging must have \d+ bytes for 2 blocks"),
        (lambda p, h, s: p.unpack(5, s, [0, 1]), "header must be a PackHeader or its bytes, got 5"),
        (
            lambda p, h, s: p.unpack(h, s, [0, 1], src_positions=[0, 1]),
            "src_positions must be None for a plan without rope",
        ),
    ],
)
def test_unpack_rejects_bad_calls(call, message):
    packer = mk.Packer(make_view("nhd_per_layer", SIZES))
    header, staging = sent(packer, [1, 2])
    before = snapshot(packer.views[0])
    with pytest.raises(mk.InvalidArgument, match=f"Packer.unpack: {message}"):
        call(packer, header, staging)
    assert torch.equal(snapshot(packer.views[0]), before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"first_head": -(10**5000)}, "first_head must be an integer in 0 to .*, got a huge"),
        ({"first_head": -1}, "first_head must be an integer in 0 to .*, got -1"),
        ({"first_layer": 0.5}, "first_layer must be an integer in 0 to .*, got 0.5"),
        ({"layers": range(0)}, r"layers must be a range of range\(0, 4\), .* got range\(0, 0\)"),
        ({"layers": range(3, 5)}, "layers must be a range of .* got range\\(3, 5\\)"),
        ({"layers": [1]}, "layers must be a range of .* got \\[1\\]"),
        ({"first_head": True}, "first_head must be an integer in 0 to .*, got True"),
        ({"dtype": torch.float8_e4m3fn}, "dtype must be fp8, and convert be given"),
        ({"dtype": torch.half, "convert": mk.Fp8()}, "dtype must be fp8, and convert be given"),
        ({"convert": 0.5}, "convert must be mk.Fp8 or None, got float"),
        ({"rope": 1}, "rope must be mk.Rope or None, got int"),
    ],
)
def test_packer_rejects_bad_options(options, message):
    with pytest.raises(mk.InvalidArgument, match=f"Packer: {message}"):
        mk.Packer(make_view("nhd_per_layer", SIZES), **options)


@pytest.mark.parametrize(
    ("dtype", "options", "message"),
    [
        (torch.int32, {"convert": mk.Fp8()}, "Packer: convert must be None for views of other"),
        (
            torch.float8_e5m2,
            {"convert": mk.Fp8(), "dtype": torch.float8_e4m3fn},
            "Packer: dtype must be None where the first view is not float32, float16 or bfloat16",
        ),
        (
            torch.half,
            {"convert": mk.Fp8(torch.ones(5, 5, 5))},
            r"scale must broadcast to .*, \[layer, kv, head\] of the fp8",
        ),
        (
            torch.int16,
            {"rope": mk.Rope()},
            "Packer: rope must be given floats to turn, got torch.i",
        ),
        (torch.half, {"rope": mk.Rope(rotary_dim=64)}, "Rope: rotary_dim must be even and, with"),
    ],
)
def test_packer_rejects_transforms_that_do_not_fit_its_views(dtype, options, message):
    with pytest.raises(mk.InvalidArgument, match=message):
        mk.Packer(make_view("nhd_per_layer", SIZES, dtype=dtype), **options)


def test_packer_accepts_numpy_integers():
    view = make_view("nhd_per_layer", SIZES)
    packer = mk.Packer(view, first_head=np.int64(2), first_layer=np.int32(3))
    header = packer.header(np.int64(4), chunk_bytes=np.int64(1))
    assert header == mk.Packer(view, first_head=2, first_layer=3).header(4, chunk_bytes=1)
    assert mk.PackHeader.from_bytes(header.to_bytes()) == header
    assert packer.header(1 << 24).check()
    with pytest.raises(mk.InvalidArgument, match="num_blocks must be an integer in 0 to 16777216"):
        packer.header((1 << 24) + 1)


def test_nothing_is_written_if_a_later_view_has_no_memory():
    cache = [make_view("nhd_per_layer", SIZES), mk.KVView(torch.zeros(6, 3), "block dim")]
    message = sent(mk.Packer(cache), [0])
    before = snapshot(cache[0])
    cache[1].tensors[0].untyped_storage().resize_(0)
    with pytest.raises(mk.InvalidArgument, match="their memory was freed"):
        mk.Packer(cache).unpack(*message, [3])
    assert torch.equal(snapshot(cache[0]), before)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_flipped_bit_in_any_record_is_detected(data):
    src, dst = make_view("nhd_per_layer", SIZES), make_view("lhbnc", SIZES, seed=7)
    header, staging = sent(mk.Packer(src), [1, 2, 3])
    record = mk.PackHeader.from_bytes(header).record_bytes
    wrong = data.draw(st.integers(0, 2))
    used = mk.PackHeader.from_bytes(header).checksum_offset + 8
    bit = data.draw(st.integers(0, used * 8 - 1))
    staging[wrong * record + bit // 8] ^= 1 << bit % 8
    before = snapshot(dst)
    with pytest.raises(mk.ChecksumError, match=f"Packer.unpack: staging: record {wrong} must have"):
        mk.Packer(dst).unpack(header, staging, [0, 1, 2])
    assert torch.equal(snapshot(dst), before), "something was written"
    ids = [i if i != wrong else HOLE for i in range(3)]
    assert mk.Packer(dst).unpack(header, staging, ids)


def test_corrupt_records_are_not_written(backend):
    src = make_view("nhd_per_layer", SIZES, dtype=torch.int16, device=backend.device)
    dst = make_view("hnd_per_layer", SIZES, dtype=torch.int16, device=backend.device, seed=4)
    header, staging = sent(mk.Packer(src), [0, 1, 2], engine=backend.engine)
    staging[mk.PackHeader.from_bytes(header).record_bytes + 77] ^= 4
    before = snapshot(dst)
    packer = mk.Packer(dst)
    with pytest.raises(mk.ChecksumError, match=r"record 1 must|staging\[1\]: block 1 must"):
        packer.unpack(header, staging, [3, 4, 5], engine=backend.engine)
        packer.check()
    assert torch.equal(snapshot(dst), before)


def test_only_corrupt_records_are_left_to_the_kernel():
    """It skips those that are wrong by itself, and reports them."""
    records, none = torch.arange(4), torch.zeros(4, dtype=torch.bool)
    assert without_right_ones(records, none).tolist() == [0, 1, 2, 3]
    wrong = none.clone()
    wrong[2] = True
    assert without_right_ones(records, wrong).tolist() == [HOLE, HOLE, 2, HOLE]
    assert without_right_ones(records, ~none).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("tokens", "counts"), [((4, 3), (2, 2)), ((3, 4), (2, 2)), ((2, 4), (4, 2)), ((4, 2), (2, 4))]
)
def test_with_other_block_sizes_only_wanted_records_are_verified(tokens, counts):
    """A record is wanted if one of its tokens is."""
    num_records, num_ids = counts
    sizes = Sizes(layer=1, block=6, head=1, token=tokens[0], dim=8)
    src = make_view("nhd_per_layer", sizes)
    header, staging = sent(mk.Packer(src), list(range(num_records)))
    record_bytes = mk.PackHeader.from_bytes(header).record_bytes
    dst_sizes = dataclasses.replace(sizes, token=tokens[1])
    num_tokens = min(num_records * tokens[0], num_ids * tokens[1])
    for wrong in range(num_records):
        damaged = staging.clone()
        damaged[wrong * record_bytes] ^= 1
        for hole in range(num_ids):
            dst = make_view("nhd_per_layer", dst_sizes, seed=5)
            before = snapshot(dst)
            ids = [HOLE if i == hole else i for i in range(num_ids)]
            goes_to = {t // tokens[1] for t in range(num_tokens) if t // tokens[0] == wrong}
            if goes_to == {hole}:
                assert mk.Packer(dst).unpack(header, damaged, ids)
                continue
            with pytest.raises(mk.ChecksumError, match=f"record {wrong} must have"):
                mk.Packer(dst).unpack(header, damaged, ids)
            assert torch.equal(snapshot(dst), before)
