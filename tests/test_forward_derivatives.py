"""A tensor with a forward tangent is refused: the result would silently have none."""

import pytest
import torch
from torch.autograd import forward_ad

import mooncake_kernels as mk

AXES = "block token head dim"
SHAPE = (6, 2, 1, 8)


def gather(tensor):
    return mk.gather_blocks(mk.KVView(tensor, AXES), [0])


def gather_into(tensor):
    view = mk.KVView(torch.zeros(SHAPE), AXES)
    return mk.gather_blocks(view, [*range(6)], tensor.view(view.packed_shape(6)))


def append(tensor):
    mk.append_kv(tensor[:, 0], None, torch.zeros(SHAPE), None, torch.arange(6))
    return tensor


def append_to(tensor):
    mk.append_kv(torch.ones(1, 1, 8), None, tensor, None, torch.tensor([0]))
    return tensor


def attend(tensor):
    rows = mk.mask.rows(mk.mask.causal(), mk.ChunkBatch([6], [6]))
    cache, table = torch.ones(SHAPE), torch.tensor([[0, 1, 2]], dtype=torch.int32)
    return mk.paged_attention(tensor[:, 0], cache, cache, table, rows)[0]


def attend_scaled(tensor):
    rows = mk.mask.rows(mk.mask.causal(), mk.ChunkBatch([6], [6]))
    cache, table = torch.ones(SHAPE), torch.tensor([[0, 1, 2]], dtype=torch.int32)
    scale = tensor[0, 0, 0, 0]
    return mk.paged_attention(torch.ones(6, 1, 8), cache, cache, table, rows, v_scale=scale)[0]


def append_scaled(tensor):
    rows, slots = torch.ones(1, 1, 8), torch.tensor([0])
    mk.append_kv(rows, None, torch.zeros(SHAPE), None, slots, k_scale=tensor[0, 0, 0, :1])
    return tensor


def merge(tensor):
    return mk.merge_attention(tensor, torch.zeros(SHAPE[:3]))[0]


def simhash(tensor):
    return mk.simhash(tensor.view(-1, 8), torch.ones(8, 8))


CALLS = {
    gather: "KVView: tensor 0",
    gather_into: "gather_blocks: out",
    append: "append_kv: k",
    append_to: "append_kv: k_cache",
    attend: "paged_attention: q",
    attend_scaled: "paged_attention: v_scale",
    append_scaled: "append_kv: k_scale",
    merge: "merge_attention: outs",
    simhash: "simhash: embeddings",
}


@pytest.mark.parametrize("call", CALLS)
def test_forward_tangents_are_rejected(call):
    tensor = torch.ones(SHAPE)
    message = rf"^{CALLS[call]} must not have a tangent.* detach\(\)"
    with pytest.raises(mk.InvalidArgument, match=message):
        torch.func.jvp(call, (tensor,), (tensor,))
    with forward_ad.dual_level(), torch.no_grad():  # which records no backward, but tangents
        with pytest.raises(mk.InvalidArgument, match=message):
            call(forward_ad.make_dual(tensor, tensor))
        call(forward_ad.make_dual(tensor, tensor).detach())
