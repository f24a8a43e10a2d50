"""Members without engines: a cache each, over any transport."""

from types import SimpleNamespace

import pytest
import torch

import mooncake_kernels as mk
from mooncake_serving.dist_attention import Geometry, LoanLedger, LoanOptions, Member
from mooncake_serving.dist_attention.engine.blocks import SharedAllocator
from mooncake_serving.engine import ModelConfig, PagedKVCache

CONFIG = ModelConfig(
    num_layers=2,
    hidden_size=96,
    ffn_size=64,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=10,
    max_position=512,
    rms_eps=1e-5,
    rope_theta=1e4,
)
BLOCK_SIZE, MAX_ROWS = 4, 32


def make_cache(num_blocks=32, dtype=torch.float32, seed=0, **changes):
    """A cache of random keys and values."""
    cache = PagedKVCache(CONFIG, num_blocks, block_size=BLOCK_SIZE, dtype=dtype, **changes)
    generator = torch.Generator().manual_seed(seed)
    for index in range(cache.num_layers):
        for tensor in cache.layer(index):
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return cache


def attend_to(q, k, v):
    """float64 attention of ``[heads, dim]`` to ``[n, kv_heads, dim]``."""
    k, v = (t.double().repeat_interleave(q.shape[0] // t.shape[1], dim=1) for t in (k, v))
    scores = torch.einsum("hd,nhd->hn", q.double(), k) / q.shape[1] ** 0.5
    return torch.einsum("hn,nhd->hd", scores.softmax(-1), v)


@pytest.fixture
def ledger():
    return LoanLedger(stale_s=60)


@pytest.fixture
def join(ledger):
    """Make a member: ``join(num_blocks=..)``; it has the attributes of its parts."""
    made = []

    def make(*, max_rows=MAX_ROWS, transports=("tcp",), cache=None, options=None, **changes):
        cache = cache or make_cache(seed=len(made), **changes)
        transfer = mk.TransferEngine(transports=transports)
        blocks = SharedAllocator(cache.num_blocks)
        geometry = Geometry.of(cache, CONFIG.num_heads, max_rows)
        member = Member(transfer, cache, geometry, blocks, ledger, options or LoanOptions())
        made.append(
            SimpleNamespace(
                member=member,
                name=member.name,
                cache=cache,
                blocks=blocks,
                transfer=transfer,
                geometry=geometry,
                borrower=member.borrower,
                lender=member.lender,
            )
        )
        return made[-1]

    yield make
    for one in made:
        one.member.close()
        one.transfer.close()
        assert one.blocks.num_free == one.blocks.num_blocks, "every block has come back"
