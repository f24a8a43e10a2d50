"""Heads whose distance from the first one needs more than 32 bits."""

import os

import pytest
import torch

import mooncake_kernels as mk

HEADS, DIM, STRIDE = 128, 16, 17_024_000
WRAP = 1 << 31  # elements: of an offset of 32 bits that lead back, into the file


@pytest.fixture
def spread(engine, tmp_path):
    """A function that returns zeros ``[2, head, dim]`` in a sparse file, in which offsets wrap."""
    if engine.device == "cuda" or engine.engine == "reference":
        pytest.skip("no sparse file: each tensor would take gigabytes")

    def make(name):
        path, size = tmp_path / name, WRAP + HEADS * STRIDE
        path.touch()
        os.truncate(path, 2 * size)
        flat = torch.from_file(str(path), shared=True, size=size, dtype=torch.float16)
        return flat.as_strided((2, HEADS, DIM), (DIM, STRIDE, 1), WRAP)

    return make


def random(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(5)).half()


def test_last_head_reads_its_own_queries(engine, spread):
    near, q = random(2, HEADS, DIM), spread("q")
    q.copy_(near)
    cache, table = random(2, 16, 1, DIM), torch.tensor([[1, 0]], dtype=torch.int32)
    rows = mk.mask.rows(mk.mask.causal(), mk.ChunkBatch([2], [20]))
    got, expected = (
        mk.paged_attention(each, cache, cache, table, rows, engine=engine.engine)[0]
        for each in (q, near)
    )
    assert torch.equal(got, expected)


def test_last_head_writes_its_own_rows(engine, spread):
    rows = random(2, HEADS, DIM)
    far, packed = spread("k"), torch.zeros(1, 2, HEADS, DIM, dtype=torch.float16)
    far.copy_(rows)
    slots = torch.tensor([1, 0])
    mk.append_kv(far, None, packed, None, slots, engine=engine.engine)
    assert torch.equal(packed[0], rows.flip(0))
    cache = spread("cache")
    mk.append_kv(rows, None, cache[None], None, slots, engine=engine.engine)
    assert torch.equal(cache, rows.flip(0))
