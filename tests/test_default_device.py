"""The specifications do not make their tensors on torch's default device.

An engine may have set it, as vLLM does around the making of its model.
"""

import pytest
import torch

import mooncake_kernels as mk

RULES = {
    "causal": mk.mask.causal(),
    "documents": mk.mask.causal() & mk.mask.documents([0, 2]),
    "tree": mk.mask.tree([-1, 0, 0, 1]),
}


def equal(found, wanted):
    if isinstance(wanted, torch.Tensor):
        return found.device == wanted.device and torch.equal(found, wanted)
    return all(equal(*pair) for pair in zip(found, wanted, strict=True))


def of_masks():
    batch = mk.ChunkBatch([2, 4], [5, 8])
    for rule in RULES.values():
        rows = mk.mask.rows(rule, batch, engine="reference")
        block_map = rows.block_map(2, 2, engine="reference")
        yield rows.intervals, rows.tail_bits, rows.dense(), rows.packed(engine="reference").packed
        yield block_map.ranges, block_map.work, block_map.indices("any"), *block_map.bsr()
        yield mk.mask.rows_from_dense(rows.dense(), batch).intervals
        builder = mk.mask.MaskBuilder(rule, mk.ChunkBatch([4, 4], [8, 8]), engine="reference")
        builder.set_lengths([1, 4], [8, 8])
        yield builder.build().intervals


def of_attention():
    rows = mk.mask.rows(RULES["tree"], mk.ChunkBatch([2, 4], [5, 8]))
    generator = torch.Generator("cpu").manual_seed(1)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, device="cpu")

    cache, slots = normal(4, 4, 2, 8), torch.tensor([5, -1, 2], device="cpu")
    table = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32, device="cpu")
    for interleaved in (False, True):
        mk.append_kv(
            *(normal(3, 2, 8), None, cache, None, slots), rope=mk.Rope(interleaved=interleaved),
            positions=slots.abs(), engine="reference",
        )  # fmt: skip
    out, lse = mk.paged_attention(normal(6, 4, 8), cache, cache, table, rows, engine="reference")
    outs, lses = torch.stack((out, -out)), torch.stack((lse, lse + 1))
    yield cache, out, lse, mk.merge_attention(outs, lses, engine="reference")


def of_copies():
    tensors = [torch.arange(96, device="cpu").float().view(3, 4, 8) + i for i in range(2)]
    src = mk.KVView(tensors, "block token dim")
    dst = mk.KVView([torch.zeros_like(t) for t in tensors], "block token dim")
    plan = mk.CopyPlan(src, dst, rope=mk.Rope(), checksum=True)
    positions = {"src_positions": [0, 4], "dst_positions": [8, 0]}
    yield plan.run([0, 2], [1, 0], **positions, engine="reference"), dst.tensors


def of_similarity():
    planes = torch.linspace(-1, 1, 64, device="cpu").view(4, 16)
    signatures = mk.simhash(torch.eye(4, device="cpu"), planes, engine="reference")
    yield signatures, mk.hamming_match(signatures, signatures.flip(0), engine="reference")


@pytest.mark.parametrize("made_by", [of_masks, of_attention, of_copies, of_similarity])
def test_results_are_independent_of_the_default_device(made_by):
    wanted = [*made_by()]
    with torch.device("meta"):
        found = [*made_by()]
    assert equal(found, wanted)
