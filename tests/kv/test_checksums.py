"""Checksums of blocks: equal for equal blocks in any layout, different for any others."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mooncake_kernels as mk
from mooncake_kernels import _library

from .layouts import LAYOUTS, PACKED_AXES, Sizes, addressed, make_view, snapshot

HOLE = -1
SIZES = Sizes(layer=2, block=6, head=2, token=4, dim=8)


pytestmark = pytest.mark.usefixtures("not_triton")


def by_definition(rows: list[bytes]) -> int:
    """The docstring's loop in plain integers; int64, as torch has it."""
    total, index, mask = 0, 0, 2**64 - 1
    for row in rows:
        row += bytes(-len(row) % 8)
        for at in range(0, len(row), 8):
            word = int.from_bytes(row[at : at + 8], "little")
            key = (index * 0x9E3779B97F4A7C15 + 0xD1B54A32D192ED03) & mask | 1
            product = ((word ^ word >> 32) + 0x8CB92BA72F3D8DD7) * key & mask
            total += product ^ product >> 32
            index += 1
    total &= mask
    return total - 2**64 if total >> 63 else total


def packed_rows(view, block):
    engine = "reference" if view.device.type == "cpu" else "auto"
    packed = mk.gather_blocks(view, [block], axes=PACKED_AXES, engine=engine)
    return [bytes(row) for row in packed.view(torch.uint8).flatten(0, -2).cpu().numpy()]


def flip(tensor: torch.Tensor, bit: int) -> None:
    """Flip one bit of a packed tensor's memory."""
    tensor.view(torch.uint8).flatten()[bit // 8] ^= 1 << bit % 8


@pytest.mark.parametrize("layout", LAYOUTS)
def test_checksum_matches_the_definition_in_any_layout(backend, layout):
    view = make_view(layout, SIZES, device=backend.device)
    ids = torch.tensor([5, HOLE, 0, 5], device=backend.device)
    sums = mk.checksum_blocks(view, ids, engine=backend.engine)
    assert sums.device.type == backend.device and sums.dtype == torch.int64
    expected = [by_definition(packed_rows(view, block)) for block in (5, 0)]
    assert sums.tolist() == [expected[0], 0, expected[1], expected[0]]


@pytest.mark.parametrize("dim", [1, 3, 8, 20, 656])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float64])
def test_checksum_of_rows_of_any_length(backend, dim, dtype):
    sizes = Sizes(layer=1, block=3, head=1, token=2, dim=dim)
    view = make_view("nhd_per_layer", sizes, dtype=dtype, device=backend.device, padding=1)
    sums = mk.checksum_blocks(view, [2], engine=backend.engine)
    assert sums.tolist() == [by_definition(packed_rows(view, 2))]


@pytest.fixture
def streams_always():
    """As a copy that is larger than the cache."""
    before = _library.set_stream_from_bytes(1)
    yield
    _library.set_stream_from_bytes(before)


@pytest.mark.parametrize("dim", [32, 64, 20])  # rows of 1, 2 and 5/8 lines of the cache
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.usefixtures("streams_always")
def test_copy_past_the_cache_has_the_same_bytes_and_checksums(layout, dim):
    sizes = Sizes(layer=2, block=6, head=3, token=4, dim=dim)
    src = make_view("nhd_per_layer", sizes)
    views = [make_view(layout, sizes, seed=50) for _ in range(2)]
    sums = [
        mk.CopyPlan(src, dst, checksum=True).run([4, HOLE, 0], [1, 2, 3], engine=engine)
        for dst, engine in zip(views, ("host", "reference"), strict=True)
    ]
    assert torch.equal(*sums)
    assert torch.equal(*(snapshot(view) for view in views))


def test_copy_returns_checksums_of_the_written_blocks(backend):
    src = make_view("nhd_per_layer", SIZES, device=backend.device)
    dst = make_view("block_first_hnd", SIZES, device=backend.device, seed=50)
    plan = mk.CopyPlan(src, dst, checksum=True)
    sums = plan.run([4, HOLE, 0], [1, 2, 3], engine=backend.engine)
    plan.check()
    expected = mk.checksum_blocks(src, [4, HOLE, 0], engine=backend.engine)
    assert torch.equal(sums, expected)
    assert torch.equal(mk.checksum_blocks(dst, [1, 3]), expected[[0, 2]])
    assert mk.CopyPlan(src, dst).run([0], [0]) is None


def test_fp8_conversion_checksums_the_fp8_cache(backend):
    """What travels is summed: by the writer as written, by the reader as read."""
    src = make_view("nhd_per_layer", SIZES, dtype=torch.bfloat16, device=backend.device)
    small = make_view("page_head", SIZES, dtype=torch.float8_e5m2, device=backend.device)
    back = make_view("universal", SIZES, dtype=torch.bfloat16, device=backend.device)
    there = mk.CopyPlan(src, small, convert=mk.Fp8(0.5), checksum=True)
    sums = there.run([3, 1], [0, 5], engine=backend.engine)
    assert torch.equal(sums, mk.checksum_blocks(small, [0, 5], engine=backend.engine))
    again = mk.CopyPlan(small, back, convert=mk.Fp8(0.5), checksum=True)
    again.run([0, 5], [2, 4], checksums=sums, engine=backend.engine)
    again.check()


def test_partial_copy_checksums_only_the_copied_part(backend):
    """A slice of heads, some layers, the half of a block, single slots: packed, then summed."""
    src = make_view("nhd_per_layer", SIZES, device=backend.device)
    sizes = Sizes(layer=2, block=6, head=1, token=8, dim=8)
    dst = make_view("hnd_per_layer", sizes, device=backend.device, seed=9)
    plan = mk.CopyPlan(src, dst, layers=[1], src_heads=slice(1, 2), checksum=True)
    sums = plan.run([2, 4, 1], [3, 0], engine=backend.engine)
    rows = packed_rows(mk.KVView([dst.tensors[1]], dst.axes), 3)
    assert sums[0] == by_definition(rows)
    sums = plan.run_slots([7, HOLE], [9, 3], engine=backend.engine)
    keys, values = (dst.plane(1, kv)[1, 0, 1].contiguous() for kv in range(2))
    rows = [bytes(row.view(torch.uint8).cpu().numpy()) for row in (keys, values)]
    assert sums.tolist() == [by_definition(rows), 0]


def test_several_views_share_one_checksum(backend):
    """As if the rows of the second view came behind those of the first."""

    def cache(seed):
        keys = make_view("nhd_per_layer", SIZES, device=backend.device, seed=seed)
        scales = addressed((6, 2, 3), torch.uint8, backend.device, seed)
        return [keys, mk.KVView(scales, "block head dim")]

    src, dst = cache(1), cache(70)
    plan = mk.CopyPlan(src, dst, checksum=True)
    sums = plan.run([3], [5], engine=backend.engine)
    assert sums.tolist() == [by_definition(packed_rows(src[0], 3) + packed_rows(src[1], 3))]
    plan.run([4], [1], checksums=mk.CopyPlan(dst, src, checksum=True).run([5], [4]))
    flip(src[1].tensors[0][3], 5)
    with pytest.raises(mk.ChecksumError, match=r"src_blocks\[0\]: block 3 must have"):
        plan.run([3], [2], checksums=sums, engine=backend.engine)
        plan.check()


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_flipped_bit_is_detected_and_located(data):
    name = data.draw(st.sampled_from(list(LAYOUTS)))
    src = make_view(name, SIZES, seed=data.draw(st.integers(0, 5)))
    dst = make_view("page_head", SIZES, seed=90)
    plan = mk.CopyPlan(src, dst, checksum=True)
    ids = data.draw(st.permutations(range(SIZES.block)))
    sums = mk.checksum_blocks(src, ids)
    wrong = data.draw(st.integers(0, SIZES.block - 1))
    layer, kv = data.draw(st.integers(0, 1)), data.draw(st.integers(0, 1))
    row = src.plane(layer, kv)[
        ids[wrong], data.draw(st.integers(0, 1)), data.draw(st.integers(0, 3))
    ]
    flip(row, data.draw(st.integers(0, row.nbytes * 8 - 1)))
    before = snapshot(dst)
    with pytest.raises(mk.ChecksumError, match=rf"src_blocks\[{wrong}\]: block {ids[wrong]} must"):
        plan.run(ids, range(SIZES.block), checksums=sums)
    assert torch.equal(snapshot(dst), before), "something was copied"


def test_only_the_corrupt_block_is_skipped(backend):
    """Where a kernel finds it, all others are copied; on the CPU nothing is."""
    src = make_view("nhd_per_layer", SIZES, device=backend.device)
    dst = make_view("hnd_per_layer", SIZES, device=backend.device, seed=4)
    sums = mk.checksum_blocks(src, [0, 1, 2])
    before = snapshot(dst)
    flip(src.tensors[0][0, 1], 77)
    plan = mk.CopyPlan(src, dst, checksum=True)
    with pytest.raises(mk.ChecksumError, match=r"CopyPlan.run: src_blocks\[1\]: block 1 must have"):
        plan.run([0, 1, 2], [3, 4, 5], checksums=sums, engine=backend.engine)
        plan.check()
    if backend.device == "cpu":
        assert torch.equal(snapshot(dst), before)
    else:
        copied = mk.gather_blocks(dst, [3, 5], axes=PACKED_AXES, engine="cuda").view(torch.uint8)
        packed = mk.gather_blocks(src, [0, 2], axes=PACKED_AXES, engine="cuda").view(torch.uint8)
        assert torch.equal(copied, packed)
    plan.run([0, HOLE, 2], [3, 4, 5], checksums=sums, engine=backend.engine)
    plan.check()


def test_swapped_rows_and_swapped_blocks_change_the_checksum():
    view = make_view("nhd_per_layer", SIZES)
    sums = mk.checksum_blocks(view, [0, 1])
    assert sums[0] != sums[1]
    tensor = view.tensors[0]
    tensor[0, 0] = tensor[0, 0].flip(0)
    assert mk.checksum_blocks(view, [0]) != sums[0]
    zeros = mk.KVView(torch.zeros(3, 4, 8), "block token dim")
    assert mk.checksum_blocks(zeros, [0]) != 0, "a block of zeros is not a hole"


def test_checksum_blocks_rejects_bad_arguments(backend):
    view = make_view("nhd_per_layer", SIZES, device=backend.device)
    with pytest.raises(
        mk.InvalidArgument, match=r"block_ids\[1\] must be -1 or in \[0, 6\), got 6"
    ):
        mk.checksum_blocks(view, [0, 6], engine=backend.engine)
        if backend.device == "cuda":
            torch.cuda.synchronize()
            view.sums[1].raise_if_any()  # as the next call would
    for sums, message in [
        (torch.zeros(2), r"checksums must be int64 of shape \(1,\), got torch.float32 .*\(2,\)"),
        ([1], r"checksums must be int64 of shape \(1,\), got list"),
    ]:
        with pytest.raises(mk.InvalidArgument, match=message):
            mk.CopyPlan(view, view, checksum=True).run([0], [1], checksums=sums)
    with pytest.raises(mk.InvalidArgument, match="view must be a KVView, got int"):
        mk.checksum_blocks(3, [0])


def test_checksum_error_of_run_slots_names_a_slot():
    view = make_view("nhd_per_layer", SIZES)
    plan = mk.CopyPlan(view, make_view("nhd_per_layer", SIZES), checksum=True)
    with pytest.raises(mk.ChecksumError, match=r"CopyPlan.run_slots: src_slots\[0\]: slot 7 must"):
        plan.run_slots([7], [1], checksums=torch.zeros(1, dtype=torch.int64))


def test_holes_of_an_empty_cache_have_checksum_zero(backend):
    view = mk.KVView(torch.zeros(0, 4, 2, 8, device=backend.device), "block token head dim")
    sums = mk.checksum_blocks(view, [HOLE, HOLE], engine=backend.engine)
    assert sums.tolist() == [0, 0]


def test_operators_pass_opcheck():
    src, dst = make_view("nhd_per_layer", SIZES), make_view("kv_apart", SIZES, seed=9)
    plan = mk.CopyPlan(src, dst, rope=mk.Rope(), checksum=True)
    [(_, rows)] = plan._copying.blocks.jobs("test")
    ids, sums = torch.tensor([1, 2]), torch.zeros(2, dtype=torch.int64)
    cos_sin = torch.rand(2, 2, 4)
    torch.library.opcheck(
        torch.ops.mooncake_kernels.transform_blocks.default,
        (
            *(src.tensors, dst.tensors, rows.values, rows.transform, ids, ids, None, cos_sin),
            *(None, None, sums, 0, 0),
        ),
    )
    torch.library.opcheck(
        torch.ops.mooncake_kernels.checksum_blocks.default,
        (src.tensors, rows.checksum_plan.values, rows.checksum_transform, ids, sums, 0, 0),
    )


def test_converted_cache_memory_is_checked_to_its_end():
    """Rows of dst are twice as long as src's: an address is refused, not written to."""
    src = mk.KVView(torch.zeros(4, 2, 8).to(torch.float8_e5m2), "block token dim")
    dst = mk.KVView(torch.zeros(4, 2, 8, dtype=torch.bfloat16), "block token dim")
    dst.tensors[0].untyped_storage().resize_(0)
    plan = mk.CopyPlan(src, dst, convert=mk.Fp8())
    with pytest.raises(mk.InvalidArgument, match="their memory was freed"):
        plan.run([0], [1])
    [(_, rows)] = plan._copying.blocks.jobs("test")
    short = [torch.zeros(4 * 2 * 8 - 1, dtype=torch.bfloat16).as_strided((4, 2, 7), (16, 8, 1))]
    with pytest.raises(ValueError, match="plan must lie inside its tensors"):
        rows.plan.resolved(src.tensors, short)


def test_nothing_is_copied_if_a_later_view_has_no_memory():
    caches = [
        [make_view("nhd_per_layer", SIZES, seed=i), mk.KVView(torch.zeros(6, 3), "block dim")]
        for i in (1, 9)
    ]
    plan = mk.CopyPlan(*caches, checksum=True)
    before = snapshot(caches[1][0])
    caches[1][1].tensors[0].untyped_storage().resize_(0)
    with pytest.raises(mk.InvalidArgument, match="their memory was freed"):
        plan.run([0], [1])
    assert torch.equal(snapshot(caches[1][0]), before)


def test_bad_id_in_a_checksummed_run_names_the_run(backend):
    src = make_view("nhd_per_layer", SIZES, device=backend.device)
    dst = make_view("nhd_per_layer", SIZES, device=backend.device, seed=2)
    plan = mk.CopyPlan(src, dst, checksum=True)
    sums = torch.zeros(1, dtype=torch.int64)
    for method, name in (("run", "src_blocks"), ("run_slots", "src_slots")):
        with pytest.raises(mk.InvalidArgument, match=rf"CopyPlan.{method}: {name}\[0\] must be"):
            getattr(plan, method)([99], [1], checksums=sums, engine=backend.engine)
            plan.check()


def test_checksums_of_holes_are_ignored(backend):
    src = make_view("nhd_per_layer", SIZES, device=backend.device)
    dst = make_view("nhd_per_layer", SIZES, device=backend.device, seed=2)
    plan = mk.CopyPlan(src, dst, checksum=True)
    wrong = torch.tensor([7])
    assert plan.run([0], [HOLE], checksums=wrong, engine=backend.engine).tolist() == [0]
    plan.check()
