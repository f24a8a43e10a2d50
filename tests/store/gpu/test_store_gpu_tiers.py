"""GPU memory through the stores above a pool: over a disk, and between hosts."""

import contextlib

import numpy as np
import pytest

from mooncake_kernels.errors import InvalidArgument
from mooncake_serving.store import SsdTier, TieredStore
from mooncake_serving.store.directory import EmbeddedDirectory

from ...transfer.support import UNTOUCHED
from ..cluster.support import Hosts
from ..support import STORED, content
from .conftest import UNIT

BUCKET = 64 * UNIT


def on_gpu(gpus, key: int, device: int = 0):
    memory = gpus.allocate(UNIT, device)
    memory.put(content((key, 0), UNIT))
    return memory


@pytest.fixture
def tiered(tmp_path):
    tier = SsdTier(tmp_path / "tier", 8 * BUCKET, bucket_bytes=BUCKET, slot_bytes=4 * UNIT)
    with TieredStore.create(8 * UNIT, tier=tier, min_uses=1, evict_ratio=0.0) as store:
        yield store


def test_objects_on_disk_are_read_into_gpus(gpus, tiered):
    keys = list(range(24))
    assert tiered.put_each(keys, [on_gpu(gpus, key, key % 2).buffer for key in keys]) == [
        STORED
    ] * len(keys)
    assert tiered.flush(30)
    for key in keys:  # each by way of the pool
        target = gpus.allocate(UNIT, key % 2)
        assert tiered.get_into(key, target.buffer) == UNIT
        np.testing.assert_array_equal(target.get(), content((key, 0), UNIT))
    targets = [gpus.allocate(2 * UNIT, key % 2) for key in keys]  # more than the pool has room for
    assert (tiered.get_into_each(keys, [t.buffer for t in targets]) == UNIT).all()
    for key, target in zip(keys, targets, strict=True):
        np.testing.assert_array_equal(target.get()[:UNIT], content((key, 0), UNIT))
        assert (target.get()[UNIT:] == UNTOUCHED).all()


def test_objects_on_disk_are_read_past_a_full_pool(gpus, tiered):
    tiered.put_each(range(12), [content((key, 0), UNIT) for key in range(12)])
    assert tiered.flush(30)
    on_disk = [key for key in range(12) if not tiered.pool.contains(tiered.keyspace.key(key))]
    assert len(on_disk) == 4
    with contextlib.ExitStack() as held:
        for key in set(range(12)) - set(on_disk):
            held.enter_context(tiered.view(key))
        first, second = gpus.allocate(UNIT - 96), gpus.allocate(96, 1)
        assert tiered.get_into(on_disk[0], first.buffer, second.buffer) == UNIT
        np.testing.assert_array_equal(
            np.concatenate([first.get(), second.get()]), content((on_disk[0], 0), UNIT)
        )
        with pytest.raises(InvalidArgument, match="get_into: buffers must have room for 4096"):
            tiered.get_into(on_disk[0], second.buffer)


@pytest.mark.parametrize("by_key", [True, False])
def test_between_hosts(gpus, by_key):
    """Puts of a host without a pool go to the other, and its reads come from there."""
    with contextlib.closing(Hosts(EmbeddedDirectory())) as hosts:
        holder, other = hosts.make("holder", by_key=by_key), hosts.make("other", 0, by_key=by_key)
        other.node.membership.refresh()
        source = on_gpu(gpus, 1, 1)
        assert other.cluster.put_from(1, source.buffer, b"tail") is STORED
        whole = np.concatenate([content((1, 0), UNIT), np.frombuffer(b"tail", np.uint8)])
        assert holder.store.get(1) == whole.tobytes()
        assert holder.cluster.put(2, on_gpu(gpus, 2).buffer) is STORED

        first, rest = gpus.allocate(1000), gpus.allocate(2 * UNIT, 1)
        assert other.cluster.get_into(1, first.buffer, rest.buffer) == len(whole)
        np.testing.assert_array_equal(first.get(), whole[:1000])
        np.testing.assert_array_equal(rest.get()[: len(whole) - 1000], whole[1000:])
        assert (rest.get()[len(whole) - 1000 :] == UNTOUCHED).all()
        part = gpus.allocate(500)
        assert other.cluster.get_into(1, part.buffer, offset=900) == len(whole)
        np.testing.assert_array_equal(part.get(), whole[900:1400])
        targets = [gpus.allocate(2 * UNIT), gpus.allocate(16), gpus.allocate(UNIT)]
        sizes = other.cluster.get_into_each([1, 2, 3], [t.buffer for t in targets])
        assert sizes.tolist() == [len(whole), -2, -1]
        np.testing.assert_array_equal(targets[0].get()[: len(whole)], whole)
        assert (targets[1].get() == UNTOUCHED).all()
