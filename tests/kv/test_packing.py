"""Blocks packed into one buffer and unpacked by a peer of another layout."""

import copy
import dataclasses
import threading
import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mooncake_kernels as mk
from mooncake_kernels.kv.pack_header import MAGIC, PREFIX, VERSION

from ..conftest import skip
from .checks import twin
from .layouts import LAYOUTS, Sizes, addressed, make_view, snapshot

HOLE = -1
SIZES = Sizes(layer=4, block=6, head=4, token=4, dim=8)


@pytest.fixture(autouse=True)
def _not_triton(request):
    backend = request.getfixturevalue("backend") if "backend" in request.fixturenames else None
    if backend is not None and backend.engine == "triton":
        skip("packing in triton", "the Triton engine moves bytes only")


def sent(packer, ids, **options):
    """Pack; return what a peer gets: the header's bytes, and a copy of the buffer's."""
    staging = torch.full((packer.header(len(ids)).num_bytes,), 0x55, dtype=torch.uint8)
    staging = staging.to(packer.device)
    header = packer.pack(ids, staging, **options)
    packer.check()
    return header.to_bytes(), staging.clone()


def part_of(model, layers, heads):
    """The part of a model's cache that a rank holds, in memory of its own."""
    tensors = [t[..., heads, :].contiguous() for t in model.tensors[layers]]
    return mk.KVView(tensors, model.axes)


@pytest.mark.parametrize("checksum", [False, True])
@pytest.mark.parametrize("src_name", ["nhd_per_layer", "kv_apart", "page_head", "blhnc"])
def test_any_layout_unpacks_any_other(backend, src_name, checksum):
    src = make_view(src_name, SIZES, device=backend.device)
    header, staging = sent(mk.Packer(src, checksum=checksum), [5, 0, 3], engine=backend.engine)
    for name in LAYOUTS:
        dst = make_view(name, SIZES, device=backend.device, seed=80)
        expected = twin(dst)
        mk.CopyPlan(src, expected).run([5, 0, 3], [1, 4, 2])
        packer = mk.Packer(dst)
        assert packer.unpack(header, staging, [1, 4, 2], engine=backend.engine)
        packer.check()
        assert torch.equal(snapshot(dst), snapshot(expected)), name


@pytest.mark.parametrize("src_ranks", [1, 2, 4])
@pytest.mark.parametrize("dst_ranks", [1, 2, 4])
@pytest.mark.parametrize("stages", [(1, 2), (2, 1), (2, 4)])
def test_ranks_and_stages_take_what_is_theirs(src_ranks, dst_ranks, stages):
    """Every rank packs what it has, every other one unpacks what is its own of it."""
    model = make_view("nhd_per_layer", SIZES, dtype=torch.int16)

    def ranks(num_ranks, num_stages):
        heads, layers = SIZES.head // num_ranks, SIZES.layer // num_stages
        for rank in range(num_ranks):
            for stage in range(num_stages):
                view = part_of(
                    model,
                    slice(stage * layers, (stage + 1) * layers),
                    slice(rank * heads, (rank + 1) * heads),
                )
                yield view, {"first_head": rank * heads, "first_layer": stage * layers}

    packed = [sent(mk.Packer(v, **at), [2, 0, 1]) for v, at in ranks(src_ranks, stages[0])]
    for view, at in ranks(dst_ranks, stages[1]):
        expected = [tensor[:, [2, 0, 1]].clone() for tensor in view.tensors]
        for tensor in view.tensors:
            tensor.zero_()
        used = [mk.Packer(view, **at).unpack(*message, [3, 4, 5]) for message in packed]
        for tensor, wanted in zip(view.tensors, expected, strict=True):
            assert torch.equal(tensor[:, 3:], wanted)
        share = max(1, src_ranks // dst_ranks) * max(1, stages[0] // stages[1])
        assert sum(used) == share


def test_replicated_heads_of_mla_and_gqa():
    """With more ranks than heads, each head is held by several."""
    rows = addressed((5, 4, 16), torch.uint8, "cpu", 3)
    src = mk.KVView(rows, "block token dim")
    dst = mk.KVView(torch.zeros_like(rows), "block token dim")
    assert mk.Packer(dst, first_head=3).unpack(*sent(mk.Packer(src, first_head=1), [1]), [2])
    assert torch.equal(dst.tensors[0][2], rows[1])
    model = make_view("hnd_per_layer", SIZES, dtype=torch.int16)
    head_1 = mk.KVView([t[:, :, 1:2].contiguous() for t in model.tensors], model.axes)
    message = sent(mk.Packer(model), [4])
    for tensor in head_1.tensors:
        tensor.zero_()
    assert mk.Packer(head_1, first_head=1).unpack(*message, [0])
    for tensor, whole in zip(head_1.tensors, model.tensors, strict=True):
        assert torch.equal(tensor[:, 0, 0], whole[:, 4, 1])
    assert not mk.Packer(head_1, first_head=4).unpack(*message, [0])


@pytest.mark.parametrize("tokens", [(4, 8), (8, 4), (2, 3)])
def test_block_sizes_differ(backend, tokens):
    src_tokens, dst_tokens = tokens
    src = make_view("nhd_per_layer", Sizes(block=12, token=src_tokens), device=backend.device)
    dst = make_view("universal", Sizes(block=24, token=dst_tokens), device=backend.device, seed=9)
    expected = twin(dst)
    src_ids, dst_ids = list(range(6)), list(range(6 * src_tokens // dst_tokens))
    mk.CopyPlan(src, expected).run(src_ids, dst_ids)
    message = sent(mk.Packer(src), src_ids, engine=backend.engine)
    packer = mk.Packer(dst)
    packer.unpack(*message, dst_ids, engine=backend.engine)
    packer.check()
    assert torch.equal(snapshot(dst), snapshot(expected))


def test_several_views_and_holes(backend):
    def cache(axes, seed):
        keys = make_view(axes, SIZES, device=backend.device, seed=seed)
        scales = addressed((6, 4, 3), torch.uint8, backend.device, seed)
        return [keys, mk.KVView(scales, "block head dim")]

    src, dst = cache("nhd_per_layer", 1), cache("kv_apart", 60)
    expected = [twin(view) for view in dst]
    mk.CopyPlan(src, expected).run([5, 2], [0, 4])
    packer = mk.Packer(dst)
    message = sent(mk.Packer(src), [5, HOLE, 2, 1], engine=backend.engine)
    packer.unpack(*message, [0, HOLE, 4, HOLE], engine=backend.engine)
    packer.check()
    for view, wanted in zip(dst, expected, strict=True):
        assert torch.equal(snapshot(view), snapshot(wanted))


@pytest.mark.parametrize("direction", ["quantize", "dequantize", "at the receiver"])
def test_fp8_and_rope_on_the_way(direction):
    wide = {"quantize": torch.bfloat16, "dequantize": torch.float8_e4m3fn}.get(
        direction, torch.half
    )
    small = torch.bfloat16 if direction == "dequantize" else torch.float8_e4m3fn
    numbers = torch.randn(6, 4, 8, generator=torch.Generator().manual_seed(3))
    src = mk.KVView(numbers.to(wide), "block token dim")
    dst = mk.KVView(torch.zeros(6, 4, 8).to(small), "block token dim")
    expected = twin(dst)
    convert = mk.Fp8(0.5)
    positions = {"src_positions": [0], "dst_positions": [7]}
    mk.CopyPlan(src, expected, convert=convert).run([3], [1])
    if direction == "quantize":
        sender = mk.Packer(src, convert=convert, dtype=small)
    else:
        sender = mk.Packer(src)
    message = sent(sender, [3])
    receives_fp8 = sender.header(1).views[0].dtype == "float8_e4m3fn"
    assert receives_fp8 == (direction != "at the receiver")
    needs = None if direction == "quantize" else convert
    assert mk.Packer(dst, convert=needs).unpack(*message, [1])
    assert torch.equal(snapshot(dst), snapshot(expected))
    plan = mk.CopyPlan(src, expected, convert=convert, rope=mk.Rope())
    plan.run([3], [1], **positions)
    assert mk.Packer(dst, convert=needs, rope=mk.Rope()).unpack(*message, [1], **positions)
    got, wanted = dst.tensors[0].float(), expected.tensors[0].float()
    # Keys that were fp8 before the turn are rounded twice, by up to 1/16 of the pair they are in.
    torch.testing.assert_close(got, wanted, rtol=0, atol=float(wanted.abs().max()) / 6)


@pytest.mark.parametrize("options", [{}, {"checksum": True}, {"layers": [(2, 0), (3, 1)]}])
def test_a_plan_packs_src_and_unpacks_dst(backend, options):
    src = make_view("nhd_per_layer", SIZES, device=backend.device)
    sizes = dataclasses.replace(SIZES, head=2)
    dst, expected = (
        make_view("page_head", sizes, device=backend.device, seed=40) for _ in range(2)
    )
    options |= {"src_heads": slice(1, 3)}
    mk.CopyPlan(src, expected, **options).run([4, 1], [0, 5])
    plan = mk.CopyPlan(src, dst, **options)
    staging = torch.zeros(1 << 16, dtype=torch.uint8, device=backend.device)
    header = plan.pack([4, 1], staging, engine=backend.engine)
    assert header.has_checksums == ("checksum" in options)
    assert plan.unpack(header, staging, [0, 5], engine=backend.engine)
    plan.check()
    assert torch.equal(snapshot(dst), snapshot(expected))


def test_chunks_are_sent_as_they_become_ready(backend):
    """A thread takes each chunk when its flag says so, and finds it complete."""
    src = make_view("nhd_per_layer", SIZES, dtype=torch.int16, device=backend.device)
    packer = mk.Packer(src)
    header = packer.header(6, chunk_bytes=2 * packer.header(1).record_bytes)
    assert [chunk.num_blocks for chunk in header.chunks] == [2, 2, 2]
    assert sum(chunk.num_bytes for chunk in header.chunks) == header.num_bytes
    staging = torch.zeros(header.num_bytes, dtype=torch.uint8, device=backend.device)
    received = torch.zeros_like(staging)
    ready = mk.LayerStream(3, backend.device, timeout_s=20)

    def send():
        for index, chunk in enumerate(header.chunks):
            ready.wait_on_host(index, 1)
            part = slice(chunk.offset, chunk.offset + chunk.num_bytes)
            received[part] = staging[part]

    sender = threading.Thread(target=send)
    sender.start()
    options = {"chunk_bytes": 2 * header.record_bytes, "engine": backend.engine}
    assert packer.pack([5, 4, 3, 2, 1, 0], staging, ready=ready, **options) == header
    sender.join()
    dst = make_view("universal", SIZES, dtype=torch.int16, device=backend.device, seed=9)
    unpacker = mk.Packer(dst)
    unpacker.unpack(header, received, range(6), engine=backend.engine)
    unpacker.check()
    assert torch.equal(mk.gather_blocks(dst, range(6)), mk.gather_blocks(src, range(5, -1, -1)))


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_flipped_bit_of_any_record_is_refused(data):
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


def test_only_the_wrong_record_is_left_out(backend):
    """Where a kernel finds it; on the CPU nothing is written."""
    src = make_view("nhd_per_layer", SIZES, dtype=torch.int16, device=backend.device)
    dst = make_view("hnd_per_layer", SIZES, dtype=torch.int16, device=backend.device, seed=4)
    header, staging = sent(mk.Packer(src), [0, 1, 2], engine=backend.engine)
    staging[mk.PackHeader.from_bytes(header).record_bytes + 77] ^= 4
    before = snapshot(dst)
    packer = mk.Packer(dst)
    with pytest.raises(mk.ChecksumError, match=r"record 1 must|staging\[1\]: block 1 must"):
        packer.unpack(header, staging, [3, 4, 5], engine=backend.engine)
        packer.check()
    if backend.device == "cpu":
        assert torch.equal(snapshot(dst), before)
    else:
        packed = mk.gather_blocks(dst, [3, 5])
        assert torch.equal(packed, mk.gather_blocks(src, [0, 2]))


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_a_damaged_header_is_refused(data):
    src = make_view("nhd_per_layer", SIZES)
    good = mk.Packer(src).header(3).to_bytes()
    assert mk.PackHeader.from_bytes(good).to_bytes() == good
    bad = bytearray(good)
    position = data.draw(st.integers(0, len(good) - 1))
    if position in (6, 7):  # two bytes that are not looked at
        return
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
        {"has_tokens": False},
    ],
)
def test_a_header_that_lies_is_refused(change):
    """Whoever makes it up can make the CRC fit."""
    view = make_view("nhd_per_layer", SIZES)
    header, staging = sent(mk.Packer(view), [1])
    header = mk.PackHeader.from_bytes(header)
    [[name, _]] = change.items()
    if name in ("offset", "dtype", "kv", "heads", "layers", "dim", "has_tokens"):
        change = {"views": (dataclasses.replace(header.views[0], **change),)}
    lie = dataclasses.replace(header, **change)
    with pytest.raises(mk.InvalidArgument, match="data must describe|data must be a header"):
        mk.PackHeader.from_bytes(lie.to_bytes())
    with pytest.raises(mk.InvalidArgument, match="header must be a PackHeader or its bytes"):
        mk.Packer(view).unpack(lie, staging, [0])


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
def test_a_cache_of_another_kind(dst, message):
    packed = sent(mk.Packer(make_view("hnd_per_layer", SIZES)), [1])
    with pytest.raises(mk.InvalidArgument, match=f"Packer.unpack: {message}"):
        mk.Packer(dst()).unpack(*packed, [0])


def staging_of(packer, num_blocks=2):
    return torch.zeros(packer.header(num_blocks).num_bytes, dtype=torch.uint8)


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
def test_bad_calls_of_pack(call, message):
    with pytest.raises(mk.InvalidArgument, match=f"Packer.pack: {message}"):
        call(mk.Packer(make_view("nhd_per_layer", SIZES)))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p, h, s: p.unpack(h, s, [0, 7]), r"block_ids\[1\] must be .* \[0, 6\), got 7"),
        (lambda p, h, s: p.unpack(h, s, [0]), "dst_blocks must have as many ids as src_blocks"),
        (lambda p, h, s: p.unpack(h, s[:-1], [0, 1]), r"staging must have \d+ bytes for 2 blocks"),
        (lambda p, h, s: p.unpack(5, s, [0, 1]), "header must be a PackHeader or its bytes, got 5"),
        (
            lambda p, h, s: p.unpack(h, s, [0, 1], src_positions=[0, 1]),
            "src_positions must be None for a plan without rope",
        ),
    ],
)
def test_bad_calls_of_unpack(call, message):
    packer = mk.Packer(make_view("nhd_per_layer", SIZES))
    header, staging = sent(packer, [1, 2])
    before = snapshot(packer._views[0])
    with pytest.raises(mk.InvalidArgument, match=f"Packer.unpack: {message}"):
        call(packer, header, staging)
    assert torch.equal(snapshot(packer._views[0]), before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"first_head": -1}, "first_head must be an integer >= 0, got -1"),
        ({"first_layer": 0.5}, "first_layer must be an integer >= 0, got 0.5"),
        ({"dtype": torch.float8_e4m3fn}, "dtype must be fp8, and convert be given"),
        ({"dtype": torch.half, "convert": mk.Fp8()}, "dtype must be fp8, and convert be given"),
        ({"convert": 0.5}, "convert must be mk.Fp8 or None, got float"),
        ({"rope": 1}, "rope must be mk.Rope or None, got int"),
    ],
)
def test_bad_packers(options, message):
    with pytest.raises(mk.InvalidArgument, match=f"Packer: {message}"):
        mk.Packer(make_view("nhd_per_layer", SIZES), **options)


def test_buffers_that_were_used_before_are_known_and_few_are_kept():
    packer = mk.Packer(make_view("nhd_per_layer", SIZES, dtype=torch.int16))
    buffers = [staging_of(packer) for _ in range(6)]
    for buffer in buffers:
        packer.pack([1, 2], buffer)
        packer.pack([3], buffer, chunk_bytes=1)
    assert len(packer._known) == 4
    fresh = mk.Packer(make_view("nhd_per_layer", SIZES, dtype=torch.int16))
    header = packer.pack([4, 5], buffers[0])
    fresh.unpack(header, buffers[0], [0, 1])
    assert torch.equal(
        mk.gather_blocks(fresh._views[0], [0, 1]), mk.gather_blocks(packer._views[0], [4, 5])
    )


def test_a_hole_leaves_its_record_as_it_was_and_its_checksum(backend):
    made = {"dtype": torch.int16, "device": backend.device}
    src, dst = (make_view("nhd_per_layer", SIZES, **made, seed=seed) for seed in (1, 9))
    packer, receiver = mk.Packer(src), mk.Packer(dst)
    staging = staging_of(packer).to(backend.device)
    header = packer.pack([4, HOLE], staging, engine=backend.engine)
    first = staging[: header.record_bytes].clone()
    packer.pack([HOLE, 2], staging, engine=backend.engine)
    assert torch.equal(staging[: header.record_bytes], first)
    receiver.unpack(header, staging, [0, 1], engine=backend.engine)
    receiver.check()
    assert torch.equal(mk.gather_blocks(dst, [0, 1]), mk.gather_blocks(src, [4, 2]))


@pytest.mark.parametrize(
    ("tokens", "counts"), [((4, 3), (2, 2)), ((3, 4), (2, 2)), ((2, 4), (4, 2)), ((4, 2), (2, 4))]
)
def test_of_other_block_sizes_the_records_that_are_wanted_must_be_right(tokens, counts):
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


def test_positions_where_only_views_without_keys_have_something_in_common():
    def cache(seed):
        keys = make_view("nhd_per_layer", SIZES, dtype=torch.half, seed=seed)
        return [keys, mk.KVView(addressed((6, 4, 3), torch.uint8, "cpu", seed), "block token dim")]

    src, dst = cache(1), cache(60)
    keys, index = snapshot(dst[0]), twin(dst[1])
    mk.CopyPlan(src[1], index).run([5], [2])
    message = sent(mk.Packer(src), [5])
    packer = mk.Packer(dst, first_head=SIZES.head, rope=mk.Rope())
    assert packer.unpack(*message, [2], src_positions=[0], dst_positions=[64])
    assert torch.equal(snapshot(dst[1]), snapshot(index))
    assert torch.equal(snapshot(dst[0]), keys)


def test_nothing_packed_and_unpacked():
    packer = mk.Packer(make_view("nhd_per_layer", SIZES))
    nothing = torch.empty(0, dtype=torch.uint8)
    assert packer.unpack(packer.pack([], nothing), nothing, [])


class Forgetful(dict):
    """As if other threads, with buffers of their own, put each entry out at once."""

    def __setitem__(self, key, value):
        """Keep nothing."""


def test_a_buffer_that_another_thread_puts_out_is_packed_all_the_same():
    packer = mk.Packer(make_view("nhd_per_layer", SIZES, dtype=torch.int16))
    packer._known = Forgetful()
    staging = staging_of(packer)
    header = packer.pack([1, 2], staging)
    assert packer.unpack(header, staging, [3, 4])
    assert torch.equal(
        mk.gather_blocks(packer._views[0], [1, 2]), mk.gather_blocks(packer._views[0], [3, 4])
    )


def test_a_copy_of_a_packer_packs_into_the_buffer_that_it_is_given():
    packer = mk.Packer(make_view("nhd_per_layer", SIZES, dtype=torch.int16))
    staging = staging_of(packer)
    packer.pack([1, 2], staging)
    wanted = staging.clone()
    staging.zero_()
    copy.deepcopy(packer).pack([1, 2], staging)
    assert torch.equal(staging, wanted)


@pytest.mark.parametrize("body", [b"[" * 100_000, b'{"views":' * 100_000, b"1" * 5000])
def test_a_header_that_python_cannot_read_is_refused(body):
    data = PREFIX.pack(MAGIC, VERSION, len(body), zlib.crc32(body)) + body
    with pytest.raises(mk.InvalidArgument, match="PackHeader: data must be a header's"):
        mk.PackHeader.from_bytes(data)


@pytest.mark.parametrize("data", [None, "MKPK", 7, [1]])
def test_a_header_of_no_bytes_is_refused(data):
    with pytest.raises(mk.InvalidArgument, match="PackHeader: data must be bytes, got"):
        mk.PackHeader.from_bytes(data)


@pytest.mark.parametrize("change", [{"has_checksums": [1]}, {"has_checksums": 1}])
def test_a_header_with_flags_that_are_none_is_refused(change):
    packer = mk.Packer(make_view("nhd_per_layer", SIZES))
    header, staging = sent(packer, [1])
    lying = dataclasses.replace(mk.PackHeader.from_bytes(header), **change)
    for header in (lying, lying.to_bytes()):
        with pytest.raises(mk.InvalidArgument):
            packer.unpack(header, staging, [1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_blocks": -1}, "num_blocks must be an integer >= 0, got -1"),
        ({"num_blocks": 1.5}, "num_blocks must be an integer >= 0, got 1.5"),
        ({"num_blocks": 1, "chunk_bytes": 0}, "chunk_bytes must be an integer >= 1, got 0"),
    ],
)
def test_bad_headers(arguments, message):
    with pytest.raises(mk.InvalidArgument, match=f"Packer.header: {message}"):
        mk.Packer(make_view("nhd_per_layer", SIZES)).header(**arguments)


def wide_and_fp8():
    numbers = torch.randn(4, 5, 2, 2, 8, generator=torch.Generator().manual_seed(2))
    wide = mk.KVView(numbers.to(torch.bfloat16), "layer block head token dim")
    fp8 = mk.KVView(torch.zeros(4, 5, 2, 2, 8).to(torch.float8_e4m3fn), wide.axes)
    return wide, fp8


SCALES = torch.tensor([[0.1, 0.5], [2.0, 3.0], [0.7, 0.9], [4.0, 8.0]])[:, None]


@pytest.mark.parametrize("to_fp8", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"layers": [(0, 1), (1, 0), (3, 2)]},
        {"src_heads": slice(0, 1), "dst_heads": slice(1, 2)},
        {"layers": [2], "src_heads": slice(1, 2), "dst_heads": slice(0, 1)},
    ],
)
def test_a_plan_packs_by_the_scales_that_it_runs_by(options, to_fp8):
    """Those of the layers and heads of the fp8 cache, whatever their places in a record."""
    wide, fp8 = wide_and_fp8()
    mk.CopyPlan(wide, fp8, convert=mk.Fp8(0.3)).run(range(5), range(5))
    src, dst = (wide, fp8) if to_fp8 else (fp8, wide)
    target, expected = twin(dst), twin(dst)
    mk.CopyPlan(src, expected, convert=mk.Fp8(SCALES), **options).run([3, 1], [0, 4])
    plan = mk.CopyPlan(src, target, convert=mk.Fp8(SCALES), checksum=True, **options)
    staging = torch.zeros(1 << 14, dtype=torch.uint8)
    assert plan.unpack(plan.pack([3, 1], staging), staging, [0, 4])
    assert torch.equal(snapshot(target), snapshot(expected))


@pytest.mark.parametrize("packs_fp8", [True, False])
def test_scales_are_by_a_packers_own_layers_and_heads(packs_fp8):
    """A stage with layers 2 and 3, a rank with head 1: of the four layers and two heads."""
    wide, fp8 = wide_and_fp8()
    source = wide if packs_fp8 else fp8
    if not packs_fp8:
        mk.CopyPlan(wide, fp8, convert=mk.Fp8(SCALES)).run(range(5), range(5))
    shape = (2, 5, 1, 2, 8)
    part = mk.KVView(
        torch.zeros(shape).to(torch.float8_e4m3fn if packs_fp8 else torch.bfloat16), wide.axes
    )
    at = {"first_head": 1, "first_layer": 2}
    own = mk.Fp8(SCALES[2:, :, 1:])
    if packs_fp8:
        message = sent(mk.Packer(source, convert=mk.Fp8(SCALES), dtype=torch.float8_e4m3fn), [3])
        assert mk.Packer(part, **at).unpack(*message, [0])
    else:
        assert mk.Packer(part, convert=own, **at).unpack(*sent(mk.Packer(source), [3]), [0])
    expected = twin(part)
    whole = twin(fp8 if packs_fp8 else wide)
    mk.CopyPlan(source, whole, convert=mk.Fp8(SCALES)).run([3], [0])
    expected.tensors[0][:, 0] = whole.tensors[0][2:, 0, 1:]
    assert torch.equal(snapshot(part), snapshot(expected))


def test_nothing_is_written_if_a_later_view_has_no_memory():
    cache = [make_view("nhd_per_layer", SIZES), mk.KVView(torch.zeros(6, 3), "block dim")]
    message = sent(mk.Packer(cache), [0])
    before = snapshot(cache[0])
    cache[1].tensors[0].untyped_storage().resize_(0)
    with pytest.raises(mk.InvalidArgument, match="their memory was freed"):
        mk.Packer(cache).unpack(*message, [3])
    assert torch.equal(snapshot(cache[0]), before)
