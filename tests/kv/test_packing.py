"""Blocks packed into one buffer, and unpacked by a peer with another layout."""

import copy
import dataclasses
import threading

import pytest
import torch

import mooncake_kernels as mk

from .checks import twin
from .layouts import LAYOUTS, PACKED_AXES, Sizes, addressed, make_view, snapshot
from .packed import HOLE, SIZES, sent, staging_of

pytestmark = pytest.mark.usefixtures("not_triton")


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
def test_ranks_and_stages_take_their_own_share(src_ranks, dst_ranks, stages):
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


@pytest.mark.parametrize("name", ["nhd_per_layer", "kv_apart", "blhnc"])
def test_layers_are_packed_and_unpacked_by_themselves(name):
    src, dst, all_of_it = (
        make_view(name, SIZES, dtype=torch.int16, seed=seed) for seed in (0, 80, 80)
    )
    mk.CopyPlan(src, all_of_it).run([5, 0, 3], [1, 4, 2])
    strips = [range(1), range(1, 3), range(3, SIZES.layer)]
    for layers in strips:
        header, staging = sent(mk.Packer(src, layers=layers), [5, 0, 3])
        assert mk.PackHeader.from_bytes(header).views[0].layers == tuple(layers)
        others = [strip for strip in strips if strip != layers]
        for other in others:  # which it does not have
            assert not mk.Packer(dst, layers=other).unpack(header, staging, [1, 4, 2])
        assert mk.Packer(dst).unpack(header, staging, [1, 4, 2])
        plane = (layers.stop - 1, 0)
        assert torch.equal(dst.plane(*plane), all_of_it.plane(*plane))
        is_last = layers.stop == SIZES.layer
        assert torch.equal(snapshot(dst), snapshot(all_of_it)) == is_last


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
def test_unpacks_into_another_block_size(backend, tokens):
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


def test_packs_several_views_and_skips_holes(backend):
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
    got = mk.gather_blocks(dst, range(6), axes=PACKED_AXES)
    assert torch.equal(got, mk.gather_blocks(src, range(5, -1, -1), axes=PACKED_AXES))


def test_used_buffers_are_cached_up_to_a_limit():
    packer = mk.Packer(make_view("nhd_per_layer", SIZES, dtype=torch.int16))
    buffers = [staging_of(packer) for _ in range(6)]
    for buffer in buffers:
        packer.pack([1, 2], buffer)
        packer.pack([3], buffer, chunk_bytes=1)
    assert len(packer._plans._known) == 4
    fresh = mk.Packer(make_view("nhd_per_layer", SIZES, dtype=torch.int16))
    header = packer.pack([4, 5], buffers[0])
    fresh.unpack(header, buffers[0], [0, 1])
    assert torch.equal(
        mk.gather_blocks(fresh.views[0], [0, 1]),
        mk.gather_blocks(packer.views[0], [4, 5]),
    )


def test_hole_leaves_its_record_and_checksum_unchanged(backend):
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


def test_packs_and_unpacks_zero_blocks():
    packer = mk.Packer(make_view("nhd_per_layer", SIZES))
    nothing = torch.empty(0, dtype=torch.uint8)
    assert packer.unpack(packer.pack([], nothing), nothing, [])


class Forgetful(dict):
    """As if other threads, with buffers of their own, put each entry out at once."""

    def __setitem__(self, key, value):
        """Keep nothing."""


def test_buffer_evicted_by_another_thread_is_still_packed():
    packer = mk.Packer(make_view("nhd_per_layer", SIZES, dtype=torch.int16))
    packer._plans._known = Forgetful()
    staging = staging_of(packer)
    header = packer.pack([1, 2], staging)
    assert packer.unpack(header, staging, [3, 4])
    assert torch.equal(
        mk.gather_blocks(packer.views[0], [1, 2]),
        mk.gather_blocks(packer.views[0], [3, 4]),
    )


def test_copied_packer_packs_into_the_given_buffer():
    packer = mk.Packer(make_view("nhd_per_layer", SIZES, dtype=torch.int16))
    staging = staging_of(packer)
    packer.pack([1, 2], staging)
    wanted = staging.clone()
    staging.zero_()
    copy.deepcopy(packer).pack([1, 2], staging)
    assert torch.equal(staging, wanted)


def test_pack_and_unpack_run_outside_the_compiled_graph():
    """Also with views of several dtypes, which are one staging buffer."""
    views = [
        make_view("nhd_per_layer", SIZES, dtype=torch.int16),
        mk.KVView(torch.rand(SIZES.block, SIZES.token, 8), "block token dim"),
    ]
    packer = mk.Packer(views)
    staging = torch.zeros(packer.header(2).num_bytes, dtype=torch.uint8)

    @torch.compile(backend="aot_eager")
    def step(x, src_ids, dst_ids):
        y = x + 1
        header = packer.pack(src_ids, staging)
        return 2 * y, packer.unpack(header, staging, dst_ids)

    y, is_taken = step(torch.zeros(2), torch.tensor([3, 1]), torch.tensor([0, 2]))
    assert torch.equal(y, torch.full((2,), 2.0)) and is_taken
    for view in views:
        packed = mk.gather_blocks(view, [3, 1, 0, 2])
        assert torch.equal(packed[:2], packed[2:])
