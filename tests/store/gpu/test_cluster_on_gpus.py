"""Nodes with pools in GPU memory: others read and put there through the engine."""

import contextlib

import numpy as np
import pytest

from mooncake_kernels.buffers import Buffer, copy_from_host
from mooncake_kernels.errors import ChecksumError, CudaError
from mooncake_serving.store import Store
from mooncake_serving.store.directory import EmbeddedDirectory

from ...fake_cuda.driver import ILLEGAL_ADDRESS
from ..cluster.support import Hosts
from ..support import EXISTS, STORED, content
from .conftest import UNIT
from .support import on_gpu


@pytest.fixture
def hosts(gpus):
    with contextlib.closing(Hosts(EmbeddedDirectory())) as made:
        yield made


def store_on(device: int, num_units: int = 64) -> Store:
    return Store.create(num_units * UNIT, device=device, evict_ratio=0.0)


def make(hosts, name: str, kind: str, **options):
    """A host whose pool is on a GPU, or in host memory; or without one."""
    if kind == "gpu":
        return hosts.make(name, store=store_on(0), **options)
    return hosts.make(name, 64 * UNIT if kind == "host" else 0, **options)


@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize("kind", ["gpu", "host", "none"])
def test_other_hosts_read_objects_on_a_gpu(hosts, gpus, kind, transport):
    """Into host memory and into a GPU's; whole objects and parts; one after the other and many."""
    by = {"transports": (transport,)}
    holder, other = make(hosts, "holder", "gpu", **by), make(hosts, "other", kind, **by)
    keys = list(range(8))
    whole = [content((key, 0), UNIT + key) for key in keys]
    values = [value if key % 2 else on_gpu(gpus, value).buffer for key, value in enumerate(whole)]
    assert holder.cluster.put_each(keys, values) == [STORED] * len(keys)

    assert other.cluster.match_prefix([*keys, 99]) == len(keys)
    for key, value in enumerate(whole):
        assert other.cluster.get(key) == value.tobytes()
    targets = [gpus.allocate(2 * UNIT, key % 2) for key in keys]
    sizes = other.cluster.get_into_each(keys, [target.buffer for target in targets])
    assert sizes.tolist() == [len(value) for value in whole]
    for target, value in zip(targets, whole, strict=True):
        np.testing.assert_array_equal(target.get()[: len(value)], value)
    part = np.empty(50, np.uint8)
    assert other.cluster.get_into(3, part, offset=100) == len(whole[3])
    np.testing.assert_array_equal(part, whole[3][100:150])

    assert other.cluster.remove_each(keys[:2]).all()
    assert not holder.store.exists(0) and holder.store.exists(2)
    assert holder.cluster.get(0) is None


def test_other_hosts_put_objects_onto_a_gpu(hosts, gpus):
    """A host without a pool has the other's node fetch what it gives."""
    holder, other = make(hosts, "holder", "gpu"), make(hosts, "other", "none")
    other.node.members(anew=True)
    whole = content((1, 0), 3 * UNIT)
    assert other.cluster.put(1, whole) is STORED
    assert other.cluster.put_from(2, on_gpu(gpus, whole, 1).buffer, b"tail") is STORED
    assert other.cluster.put(1, whole) is EXISTS
    assert holder.store.get(1) == whole.tobytes()
    assert holder.store.get(2) == whole.tobytes() + b"tail"
    with holder.store.view(2) as pinned:
        assert pinned.device == 0
        pinned.verify()


def test_from_gpu_to_gpu(hosts, gpus):
    """A node copies what another one has into its own pool."""
    first = hosts.make("first", store=store_on(0))
    second = hosts.make("second", store=store_on(1 % gpus.count))
    whole = [content((key, 0), UNIT) for key in range(4)]
    first.cluster.put_each(range(4), whole)
    assert second.cluster.fetch(range(4)) == [STORED] * 4
    for key, value in enumerate(whole):
        with second.store.view(key) as pinned:
            assert pinned.device == second.store.pool.device
            assert pinned.to_bytes() == value.tobytes()


def test_object_damaged_on_a_gpu_is_not_returned(hosts, gpus):
    holder, other = make(hosts, "holder", "gpu"), make(hosts, "other", "none")
    holder.cluster.put(1, content((1, 0), UNIT))
    with holder.store.view(1) as pinned:
        at = pinned.buffer
        copy_from_host(b"?", [Buffer(at.address, 1, at.location, True, at.owner)])
    with pytest.raises(ChecksumError):
        other.cluster.get(1)
    assert not holder.store.exists(1)


def test_gpu_copy_failure_during_fetch_is_retried(hosts, gpus, driver):
    """As if the other could not be reached: it is looked for anew, and read again."""
    holder, other = make(hosts, "holder", "gpu"), make(hosts, "other", "host")
    other.cluster.put(1, content((1, 0), UNIT))
    driver.fail("cuMemcpyAsync", ILLEGAL_ADDRESS)
    assert holder.cluster.fetch([1]) == [STORED]
    assert holder.store.stats().num_writing == 0
    assert holder.store.get(1) == content((1, 0), UNIT).tobytes()


def test_gpu_failure_at_commit_is_raised(hosts, gpus, driver):
    """Its checksum cannot be computed: the error is the caller's."""
    holder, other = make(hosts, "holder", "gpu"), make(hosts, "other", "host")
    other.cluster.put(1, content((1, 0), UNIT))
    driver.fail("cuStreamSynchronize", ILLEGAL_ADDRESS, after=1)
    with pytest.raises(CudaError):
        holder.cluster.fetch([1])
    assert not holder.store.exists(1)
    assert holder.store.stats().num_writing == 0
    assert holder.cluster.fetch([1]) == [STORED]
