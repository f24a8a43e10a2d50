"""Blocks of a worker's caches through staging memory, into another worker's."""

import pytest
import torch

from mooncake_kernels.errors import Unavailable
from mooncake_serving.connectors.vllm.caches import GroupCaches

NUM_BLOCKS = 40


def one_storage(dtype=torch.float32):
    """All layers cut out of one tensor, heads before tokens: vLLM on the CPU."""
    return list(torch.zeros(3, NUM_BLOCKS, 2, 16, 8, dtype=dtype))


def heads_inside():
    """Tokens before heads in memory, heads before tokens in the order of axes: vLLM's NHD."""
    return [torch.zeros(NUM_BLOCKS, 16, 2, 8).transpose(1, 2) for _ in range(3)]


def latents():
    """MLA."""
    return [torch.zeros(NUM_BLOCKS, 64, 72, dtype=torch.bfloat16) for _ in range(2)]


def of_two_kinds():
    """A latent, and the keys of an indexer in bytes beside it."""
    return [*latents(), *(torch.zeros(NUM_BLOCKS, 64, 13, dtype=torch.uint8) for _ in range(2))]


def odd_ones_first():
    return [torch.zeros(NUM_BLOCKS, 3, dtype=torch.uint8), *one_storage(torch.float16)]


def of_two_kernel_blocks_each():
    """Blocks of 16 tokens, of which the attention backend makes two of 8."""
    return [torch.zeros(2 * NUM_BLOCKS, 8, 2, 8).transpose(1, 2) for _ in range(3)]


def states():
    """A recurrent layer: its convolution and its state, side by side in each block."""
    pages = [torch.zeros(NUM_BLOCKS, 60) for _ in range(2)]
    return [
        [page[:, :12].unflatten(1, (3, 4)), page[:, 12:60].unflatten(1, (2, 6, 4))]
        for page in pages
    ]


def flat(layers):
    return [t for layer in layers for t in (layer if isinstance(layer, list) else [layer])]


KINDS = [
    states,
    *(one_storage, heads_inside, latents, of_two_kinds, odd_ones_first),
    of_two_kernel_blocks_each,
]


def caches_of(layers):
    return GroupCaches(layers, NUM_BLOCKS)


def blocks_of(layer):
    """The engine's blocks, each of which may be several of the attention backend's."""
    return layer.unflatten(0, (NUM_BLOCKS, -1))


def fill(layers, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for layer in layers:
        if layer.dtype == torch.uint8:
            layer.random_(generator=generator)
        else:
            layer.normal_(generator=generator)


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_round_trip_into_another_engine(kind):
    here, there = kind(), kind()
    mine, other = caches_of(here), caches_of(there)
    here, there = flat(here), flat(there)
    fill(here)
    fill(there, 1)
    before = [layer.clone() for layer in there]
    memory = torch.empty(5 * mine.block_bytes + 1, dtype=torch.uint8)
    ids, others = [3, 39, 0, 7, 21], [5, 4, 3, 2, 38]
    assert mine.staged(memory).num_rows == 5
    mine.staged(memory).fetch(ids)
    other.staged(memory).deliver(others, [True, True, False, True, True])
    del ids[2], others[2]
    for mine, other, old in zip(here, there, before, strict=True):
        blocks_of(old)[others] = blocks_of(mine)[ids]
        assert torch.equal(other, old)


def test_states_in_pieces_are_rejected():
    state = torch.zeros(NUM_BLOCKS, 3, 4).transpose(1, 2)
    with pytest.raises(Unavailable, match="must be in one piece in each block"):
        caches_of([[state]])


def test_rows_follow_each_other():
    layers = one_storage()
    fill(layers)
    caches = caches_of(layers)
    memory = torch.empty(2 * caches.block_bytes, dtype=torch.uint8)
    staged = caches.staged(memory)
    staged.fetch([4, 9])
    for row, block in enumerate([4, 9]):
        data = b"".join(layer[block].numpy().tobytes() for layer in layers)
        assert bytes(memory.view(2, -1)[row].tolist()) == data
    addresses, sizes = staged.places(2)
    assert addresses.tolist() == [[memory.data_ptr()], [memory.data_ptr() + caches.block_bytes]]
    assert sizes.tolist() == [[caches.block_bytes]] * 2


def test_layers_that_share_a_cache_are_saved_once():
    layers = one_storage()
    assert caches_of([*layers, layers[0]]).block_bytes == caches_of(layers).block_bytes


@pytest.mark.parametrize(
    "layers",
    [
        [],
        *([torch.zeros(*shape)] for shape in [(4,), (40, 2, 2, 2, 2), (39, 2), (60, 2), (0, 2)]),
    ],
)
def test_unsupported_cache_layouts_are_rejected(layers):
    with pytest.raises(Unavailable, match=r"^StoreConnector: the engine must have caches .*, got"):
        caches_of(layers)
