"""Pooled engines on the tiny model, in one process."""

import pytest

import mooncake_kernels as mk
from mooncake_serving.dist_attention import LoanLedger, LoanOptions
from mooncake_serving.dist_attention.engine import DistAttentionEngine
from mooncake_serving.engine import PagedKVCache
from tests.waiting import eventually

BLOCK_SIZE = 8


@pytest.fixture
def ledger():
    return LoanLedger(stale_s=60)


@pytest.fixture
def join(tiny, ledger):
    """Make an engine that lends to the others: ``join(num_blocks, chunk_tokens=..)``."""
    made = []

    def make(
        num_blocks,
        *,
        transports=("tcp",),
        axes="kv block token head dim",
        loan_options=None,
        **limits,
    ):
        cache = PagedKVCache(tiny.config, num_blocks, block_size=BLOCK_SIZE, axes=axes)
        transfer = mk.TransferEngine(transports=transports)
        engine = DistAttentionEngine(
            tiny, cache, transfer, ledger, loan_options=loan_options or LoanOptions(), **limits
        )
        made.append((engine, transfer))
        return engine

    yield make
    for engine, transfer in made:
        engine.close()
        transfer.close()
        assert engine.allocator.num_free == engine.cache.num_blocks, "every block has come back"


@pytest.fixture
def settled(ledger):
    """Wait until nothing is lent, as the ledger sees it."""
    return lambda: eventually(lambda: ledger.loans() == {})
