"""Packed blocks that are converted and rotated on the way."""

import pytest
import torch

import mooncake_kernels as mk

from .checks import twin
from .layouts import addressed, make_view, snapshot
from .packed import SIZES, sent

pytestmark = pytest.mark.usefixtures("not_triton")


@pytest.mark.parametrize("direction", ["quantize", "dequantize", "at the receiver"])
def test_packs_with_fp8_and_rope(direction):
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
def test_plan_packs_with_the_scales_it_runs_with(options, to_fp8):
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
def test_packer_selects_scales_of_its_own_layers_and_heads(packs_fp8):
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


def test_positions_are_rejected_if_only_views_without_keys_match():
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
