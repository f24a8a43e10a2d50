"""TieredStore: what is damaged in the pool or on the disk."""

import pytest

from mooncake_kernels.errors import ChecksumError

from ..support import STORED
from .support import PAGE
from .tiered import IN_POOL, KEYS, OBJECT, flip_in_pool, put, read, value


def test_object_damaged_on_disk(opened, tmp_path):
    store = opened()
    put(store, *KEYS)
    store.flush()
    first, second, *_ = cold = [k for k in KEYS if not store.pool.contains(store.keyspace.key(k))]
    records = [store.tier._index.find(store.keyspace.key(k)).record for k in (first, second)]
    store.close()
    with open(tmp_path / "tier", "r+b") as file:
        for record in records:
            file.seek(record.offset + PAGE + 11)
            file.write(b"\0\1\2")
    store = opened()
    with pytest.raises(ChecksumError, match="is not what its checksum says"):
        store.get(first)
    assert not store.exists(first) and store.get(first) is None
    buffers = [bytearray(OBJECT) for _ in range(3)]
    sizes = store.get_into_each([second, cold[2], first], buffers)
    assert sizes.tolist() == [-4, OBJECT, -1] and not store.exists(second)
    assert put(store, first) == [STORED]


def test_object_damaged_in_the_pool_is_not_written_to_disk(opened):
    store = opened()
    put(store, *range(IN_POOL))
    flip_in_pool(store, 0)
    put(store, *range(10, 10 + IN_POOL))
    store.flush()
    assert store.exists_each([0, 1, 2]).tolist() == [False, True, True]
    stats = store.demotion_stats()
    assert stats.num_dropped == stats.num_damaged == 1


READS = {
    "get": lambda store, key: store.get(key),
    "get_each": lambda store, key: store.get_each([key])[0],
    "view": lambda store, key: closed(store.view(key)),
    "get_into": lambda store, key: into(lambda b: store.get_into(key, b)),
    "get_into_each": lambda store, key: into(lambda b: store.get_into_each([key], [b])[0]),
}


def closed(pinned) -> bytes:
    with pinned:
        return pinned.to_bytes()


def into(read) -> bytes:
    buffer = bytearray(OBJECT)
    if (size := read(buffer)) == -4:
        raise ChecksumError("-4")
    assert size == OBJECT
    return bytes(buffer)


@pytest.mark.parametrize("name", READS)
def test_object_damaged_in_the_pool_is_read_from_disk(opened, name):
    store = opened(verify=1.0)
    put(store, *KEYS)
    store.flush()
    read(store, 0)
    flip_in_pool(store, 0)
    assert READS[name](store, 0) == value(0).tobytes()
    assert store.get(0) == value(0).tobytes()


@pytest.mark.parametrize("name", READS)
def test_object_damaged_in_pool_and_on_disk(opened, tmp_path, name):
    store = opened(verify=1.0)
    put(store, *KEYS)
    store.flush()
    read(store, 0)
    flip_in_pool(store, 0)
    content_of = bytearray((tmp_path / "tier").read_bytes())
    at = content_of.find(value(0)[:64].tobytes())
    with open(tmp_path / "tier", "r+b") as file:
        file.seek(at + 9)
        file.write(bytes([content_of[at + 9] ^ 1]))
    with pytest.raises(ChecksumError):
        READS[name](store, 0)
    assert not store.exists(0) and store.get(0) is None


def test_object_damaged_in_pool_and_not_on_disk(opened):
    store = opened(verify=1.0)
    put(store, 0)
    flip_in_pool(store, 0)
    with pytest.raises(ChecksumError):
        store.get(0)
    assert store.get(0) is None
