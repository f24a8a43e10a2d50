"""Blocks of a worker's caches through the store, into another worker's."""

import pytest
import torch

from mooncake_kernels.errors import Unavailable
from mooncake_serving.connectors.vllm import caches as module
from mooncake_serving.connectors.vllm.caches import Caches, use
from mooncake_serving.connectors.vllm.tracking import Blocks
from mooncake_serving.store import Store

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


KINDS = [
    *(one_storage, heads_inside, latents, of_two_kinds, odd_ones_first),
    of_two_kernel_blocks_each,
]


def caches_of(layers):
    return Caches(layers, NUM_BLOCKS)


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


@pytest.fixture
def store():
    with Store.create(64 << 20) as store:
        yield store


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_slots", [1, 3, 1000])
def test_blocks_round_trip_into_another_engine(monkeypatch, store, kind, num_slots):
    here, there = kind(), kind()
    fill(here)
    fill(there, 1)
    before = [layer.clone() for layer in there]
    monkeypatch.setattr(module, "STAGING_BYTES", num_slots * caches_of(here).block_bytes)
    keys, ids, others = [11, 12, 13, 14, 15], [3, 39, 0, 7, 21], [5, 4, 3, 2, 38]
    caches_of(here).save(store, Blocks(keys, ids, 0))
    assert caches_of(there).load(store, Blocks(keys, others, 0)) == set()
    for mine, other, old in zip(here, there, before, strict=True):
        blocks_of(old)[others] = blocks_of(mine)[ids]
        assert torch.equal(other, old)


def test_layers_that_share_a_cache_are_saved_once(store):
    layers = one_storage()
    assert caches_of([*layers, layers[0]]).block_bytes == caches_of(layers).block_bytes


def test_missing_blocks_are_reported_and_left_untouched(store):
    here, there = one_storage(), one_storage()
    fill(here)
    fill(there, 1)
    before = [layer.clone() for layer in there]
    caches_of(here).save(store, Blocks([1, 2, 3], [10, 11, 12], 0))
    store.remove(2)
    assert caches_of(there).load(store, Blocks([1, 2, 3, 4], [20, 21, 22, 23], 0)) == {21, 23}
    for mine, other, old in zip(here, there, before, strict=True):
        old[[20, 22]] = mine[[10, 12]]
        assert torch.equal(other, old)


def test_object_of_another_size_counts_as_missing(store):
    store.put(1, b"too short")
    layers = one_storage()
    assert caches_of(layers).load(store, Blocks([1], [5], 0)) == {5}
    assert not any(layer.any() for layer in layers)


def test_stored_blocks_are_not_copied_again(store):
    layers = one_storage()
    fill(layers)
    caches = caches_of(layers)
    caches.save(store, Blocks([1, 2], [0, 1], 0))
    caches.save(store, Blocks([1, 2, 3], [8, 9, 2], 0))  # the first two are other bytes here
    caches.load(store, Blocks([1, 3], [30, 31], 0))
    for layer in layers:
        assert torch.equal(layer[30], layer[0]) and torch.equal(layer[31], layer[2])


def test_used_blocks_are_not_evicted_before_loading():
    layers = one_storage()
    fill(layers)
    with Store.create(1 << 20) as store:
        caches = caches_of(layers)
        for first in range(0, 400, 4):
            caches.save(store, Blocks([*range(first, first + 4)], [0, 1, 2, 3], 0))
            use(store, [0, 1, 2, 3, 1000])
        assert caches.load(store, Blocks([0, 1, 2, 3], [4, 5, 6, 7], 0)) == set()
        assert caches.load(store, Blocks([4, 5], [8, 9], 0)) == {8, 9}


def test_full_pool_evicts_old_blocks_for_new_ones():
    layers = one_storage()
    fill(layers)
    with Store.create(1 << 20) as store:  # some 80 blocks, of which the first go for the last
        caches = caches_of(layers)
        for first in range(0, 400, 4):
            caches.save(store, Blocks([*range(first, first + 4)], [0, 1, 2, 3], 0))
        assert caches.load(store, Blocks([396, 397, 398, 399], [4, 5, 6, 7], 0)) == set()
        assert caches.load(store, Blocks([0, 1], [8, 9], 0)) == {8, 9}


@pytest.mark.parametrize(
    "layers",
    [[], *([torch.zeros(*shape)] for shape in [(4,), (40, 2, 2, 2, 2), (39, 2), (60, 2), (0, 2)])],
)
def test_unsupported_cache_layouts_are_rejected(layers):
    with pytest.raises(Unavailable, match=r"^StoreConnector: the engine must have caches .*, got"):
        caches_of(layers)


def test_pool_smaller_than_a_block_is_rejected():
    caches = caches_of(latents())
    with (
        Store.create(4096) as small,
        pytest.raises(Unavailable, match=f"must hold a block's {caches.block_bytes} bytes, got"),
    ):
        caches.save(small, Blocks([1], [0], 0))
