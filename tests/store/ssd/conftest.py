"""Stores with a disk behind them."""

import contextlib

import pytest

from mooncake_serving.store import SsdTier, TieredStore

from .support import PAGE
from .tiered import (
    BUCKET,
    IN_POOL,
    OBJECT,
)


@pytest.fixture
def path(tmp_path):
    """A tier's file."""
    return tmp_path / "tier"


@pytest.fixture
def full_disk(monkeypatch):
    """Whatever a disk has: it must drop something for each object that is written."""
    monkeypatch.setattr(SsdTier, "room_bytes", 0)


@pytest.fixture
def opened(tmp_path):
    """Opens stores on one file, each with an empty pool, as after a restart of the host."""
    with contextlib.ExitStack() as stores:

        def open_store(num_buckets: int = 8, **options) -> TieredStore:
            tier = SsdTier(
                tmp_path / "tier", num_buckets * BUCKET, bucket_bytes=BUCKET, slot_bytes=4 * PAGE,
                retry_s=0,
            )  # fmt: skip
            options = {"namespace": "model", "min_uses": 1, **options}
            return stores.enter_context(TieredStore.create(IN_POOL * OBJECT, tier=tier, **options))

        yield open_store
