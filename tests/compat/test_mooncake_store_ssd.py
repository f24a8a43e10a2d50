"""Values that the pool evicts to an SSD: every call finds them, and so does the next process."""

import shutil
from types import SimpleNamespace

import pytest
import torch

from mooncake_serving.compat.mooncake.store import (
    INTERNAL_ERROR,
    INVALID_PARAMS,
    NO_AVAILABLE_HANDLE,
    OBJECT_NOT_FOUND,
    MooncakeDistributedStore,
)
from mooncake_serving.compat.mooncake.store.pools import FILE_NAME

from ..metadata.support import eventually
from .store_processes import processes
from .store_support import Memory, pool_file, reasons, set_up, settings_of, value_of

MIB = 1 << 20
IN_POOL = 4 * MIB
IN_FILE, BUCKET = 64 * MIB, 4 * MIB
SIZES = {
    "MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES": str(IN_FILE),
    "MOONCAKE_OFFLOAD_BUCKET_SIZE_LIMIT_BYTES": str(BUCKET),
}
SIZE = 50_000
LONG = "n" * 3000  # a name of which the first look at an object sees a part only
KEYS = [f"k{i:03}" for i in range(200)]  # 10 MB: more than twice what the pool holds
VALUES = [value_of(i, SIZE) for i in range(len(KEYS))]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name, text in SIZES.items():
        monkeypatch.setenv(name, text)
    monkeypatch.delenv("MOONCAKE_OFFLOAD_FILE_STORAGE_PATH", raising=False)
    folder = tmp_path / "ssd"
    folder.mkdir()
    return folder


def with_ssd(path: str, folder, **options) -> MooncakeDistributedStore:
    return set_up(path, IN_POOL, enable_ssd_offload=True, ssd_offload_path=str(folder), **options)


def code_of_setup(path: str, **options) -> int:
    arguments = ("127.0.0.1", "P2PHANDSHAKE", IN_POOL, MIB, "tcp", "", path)
    return MooncakeDistributedStore().setup(*arguments, **options)


@pytest.fixture
def store(path, folder):
    """Its first values are on the SSD, and no longer in the pool."""
    store = with_ssd(path, folder)
    assert store.put(LONG, b"long") == 0
    assert store.put_tensor("tensor", torch.arange(6)) == 0
    put_each(store)
    assert are_on_disk(store, LONG, "tensor", *KEYS[:50])
    yield store
    store.close()


def put_each(store: MooncakeDistributedStore) -> None:
    """By itself, so that the first is evicted first: of a batch it is the last."""
    assert [store.put(*pair) for pair in zip(KEYS, VALUES, strict=True)] == [0] * len(KEYS)


def are_on_disk(store: MooncakeDistributedStore, *keys: str) -> bool:
    """And not in the pool."""
    found = store.batch_get_replica_desc(keys)
    return all(found[key][0].is_local_disk_replica() for key in keys)


def test_every_call_reads_values_on_the_ssd(store):
    memory = Memory(store)
    p = memory.address
    keys = iter(KEYS)

    def some(num_keys: int) -> tuple[list[str], list[bytes]]:
        taken = [next(keys) for _ in range(num_keys)]
        assert are_on_disk(store, *taken)
        return taken, [VALUES[KEYS.index(key)] for key in taken]

    [key], _ = some(1)
    assert store.is_exist(key) == 1 and store.batch_is_exist([key, "no", key]) == [1, 0, 1]
    assert store.get_size(key) == SIZE and are_on_disk(store, key)
    assert store.get_into(key, p, SIZE - 1) == INVALID_PARAMS
    [key], [value] = some(1)
    assert store.get(key) == value and not are_on_disk(store, key)
    two, values = some(2)
    assert store.get_batch(two) == values
    [key], [value] = some(1)
    assert bytes(store.get_buffer(key)) == value
    two, values = some(2)
    assert list(map(bytes, store.batch_get_buffer(two))) == values
    [key], [value] = some(1)
    assert store.get_into(key, p, SIZE) == SIZE and memory.at(0, SIZE) == value
    two, values = some(2)
    assert store.batch_get_into([*two, "no"], [p, p + SIZE, p], [SIZE, SIZE, SIZE]) == [
        SIZE,
        SIZE,
        OBJECT_NOT_FOUND,
    ]
    assert memory.at(0, 2 * SIZE) == b"".join(values)
    [key], [value] = some(1)
    parts = [[p, p + 7000]], [[7000, SIZE - 7000]]
    assert store.batch_get_into_multi_buffers([key], *parts) == [SIZE]
    assert memory.at(0, SIZE) == value
    [key], [value] = some(1)
    assert store.get_into_ranges([p], [[key]], [[[0, 50]]], [[[100, SIZE - 1]]], [[[50, 1]]]) == [
        [[50, 1]]
    ]
    assert memory.at(0, 51) == value[100:150] + value[-1:]
    [key], [value] = some(1)
    assert store.batch_get_session_start([key, "no"]) == [0, OBJECT_NOT_FOUND]
    assert store.batch_get_into_multi_buffer_ranges([key], [[p]], [[90]], [[10]]) == [90]
    assert store.batch_get_session_end([key]) == 0 and memory.at(0, 90) == value[10:100]
    assert torch.equal(store.get_tensor("tensor"), torch.arange(6))


def test_every_call_updates_values_on_the_ssd(store):
    memory = Memory(store)
    assert store.put(KEYS[0], b"other") == 0 and store.get(KEYS[0]) == VALUES[0]
    assert store.batch_put_session_start([KEYS[1]], [10]) == [-705]
    assert store.upsert(KEYS[2], b"new") == 0 and store.get(KEYS[2]) == b"new"
    assert store.batch_upsert_from([KEYS[3]], [memory.address], [SIZE]) == [0]
    assert store.get(KEYS[3]) == memory.at(0, SIZE)
    assert store.remove(KEYS[4]) == 0 and store.remove(KEYS[4]) == OBJECT_NOT_FOUND
    assert store.batch_remove([KEYS[5], "no", KEYS[6]]) == [0, OBJECT_NOT_FOUND, 0]
    assert store.batch_replica_clear([KEYS[7], "no"], store.get_hostname()) == [KEYS[7]]
    assert store.batch_is_exist(KEYS[4:8]) == [0, 0, 0, 0]
    assert store.remove_by_regex(f"^{LONG}$") == 1 and store.is_exist(LONG) == 0
    assert store.remove_by_regex("^k01") == 10
    assert store.remove_all() == len(KEYS) + 1 - 4 - 10
    assert not any(store.batch_is_exist([*KEYS, "tensor", LONG]))
    assert store.put(KEYS[0], b"again") == 0 and store.get(KEYS[0]) == b"again"


def test_replica_descriptor_of_a_value_on_the_ssd(store):
    [one] = store.get_replica_desc(KEYS[0])
    assert not one.is_memory_replica() and not one.is_disk_replica() and one.status == 3
    with pytest.raises(RuntimeError, match="must be in memory"):
        one.get_memory_descriptor()
    with pytest.raises(RuntimeError, match="must be in a shared file"):
        one.get_disk_descriptor()


def test_values_are_read_from_ssd_when_pool_has_no_room(store, caplog):
    held = [store.get_buffer(key) for key in reversed(KEYS)]
    held = [buffer for buffer in held if buffer is not None]
    assert are_on_disk(store, KEYS[0]) and store.get(KEYS[0]) == VALUES[0]
    assert bytes(store.get_buffer(KEYS[1])) == VALUES[1]
    assert are_on_disk(store, KEYS[0], KEYS[1])
    assert store.batch_get_session_start([KEYS[2]]) == [NO_AVAILABLE_HANDLE]
    reasons(caplog, "no room for 'k002', which is on the SSD")
    del held
    assert store.batch_get_session_start([KEYS[2]]) == [0]


@pytest.mark.parametrize("pool_stays", [True, False])
def test_values_on_the_ssd_survive_a_restart(path, folder, store, pool_stays):
    on_disk = [key for key in KEYS if are_on_disk(store, key)]
    assert store.remove(on_disk.pop()) == 0 and len(on_disk) > 100
    store.close()
    with pool_file() as another:
        again = with_ssd(path if pool_stays else another, folder)
        num_found = sum(again.batch_is_exist(KEYS))
        assert num_found == len(KEYS) - 1 if pool_stays else num_found >= len(on_disk)
        for key in on_disk:
            assert again.get(key) == VALUES[KEYS.index(key)]
        again.close()


def test_second_store_with_the_same_ssd_is_rejected(path, folder, store, caplog, tmp_path):
    """Of the same file, and of the same pool."""
    with pool_file() as another:
        ssd = {"enable_ssd_offload": True, "ssd_offload_path": str(folder)}
        assert code_of_setup(another, **ssd) == INTERNAL_ERROR
        reasons(caplog, "enable_ssd_offload: SsdTier: another tier has .*mooncake-store.ssd' open")
    ssd["ssd_offload_path"] = str(tmp_path)
    assert code_of_setup(path, **ssd) == INTERNAL_ERROR
    reasons(caplog, "enable_ssd_offload: TieredStore: another one has a disk behind the pool")
    assert not (tmp_path / FILE_NAME).exists()  # which takes space
    store.close()
    assert code_of_setup(path, **ssd) == 0


def test_processes_without_the_ssd_see_only_the_pool(path, folder, store):
    settings = {
        "local_hostname": "127.0.0.1",
        "metadata_server": "P2PHANDSHAKE",
        "master_server_addr": path,
    }
    with processes(settings) as (other,):
        assert other.call("get_batch", [KEYS[0], KEYS[-1]]) == [b"", VALUES[-1]]
        assert store.get(KEYS[0]) == VALUES[0]  # which brings it into the pool
        assert other.call("get", KEYS[0]) == VALUES[0]
        assert other.call("remove", KEYS[0]) == 0
        assert other.call("remove", KEYS[1]) == OBJECT_NOT_FOUND  # as far as it knows
        assert store.batch_is_exist(KEYS[:3]) == [0, 0, 1] and store.get(KEYS[1]) == b""
    store.close()
    again = with_ssd(path, folder)
    assert again.batch_is_exist(KEYS[:3]) == [0, 0, 1]
    again.close()


def test_values_on_the_ssd_survive_a_kill(path, folder):
    settings = {
        "local_hostname": "127.0.0.1",
        "metadata_server": "P2PHANDSHAKE",
        "global_segment_size": str(IN_POOL),
        "master_server_addr": path,
        "enable_ssd_offload": "true",
        "ssd_offload_path": str(folder),
    }
    with processes(settings, environment=SIZES) as (one,):
        assert one.call("put_batch", KEYS, VALUES) == 0
        one.kill()
    store = with_ssd(path, folder)
    assert store.get_batch(KEYS[:100]) == VALUES[:100]
    store.close()


def test_ssd_folder_and_size_from_the_environment(path, folder, monkeypatch, caplog):
    monkeypatch.setenv("MOONCAKE_OFFLOAD_FILE_STORAGE_PATH", str(folder))
    store = with_ssd(path, "")
    assert store.put_batch(KEYS, VALUES) == 0
    store.close()
    file = folder / FILE_NAME
    assert file.stat().st_size == IN_FILE + MIB
    monkeypatch.delenv("MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES")
    again = with_ssd(path, folder)  # keeps it
    assert sum(again.batch_is_exist(KEYS)) == len(KEYS)
    again.close()
    assert file.stat().st_size == IN_FILE + MIB
    file.unlink()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=IN_FILE))
    with_ssd(path, folder).close()  # half of what is free
    assert file.stat().st_size == IN_FILE // 2 + MIB
    file.unlink()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=BUCKET))
    ssd = {"enable_ssd_offload": True, "ssd_offload_path": str(folder)}
    assert code_of_setup(path, **ssd) == INTERNAL_ERROR
    reasons(caplog, f"must have at least {4 * BUCKET} bytes free, or MOONCAKE_OFFLOAD_TOTAL_SIZE_")
    assert not file.exists()


@pytest.mark.parametrize(
    ("where", "variables", "code", "reason"),
    [
        ("relative", {}, INVALID_PARAMS, "must be the absolute path of an existing folder, got 'r"),
        ("/none/there", {}, INVALID_PARAMS, "an existing folder, got '/none/there'"),
        ("", {}, INVALID_PARAMS, "MOONCAKE_OFFLOAD_FILE_STORAGE_PATH, must be .*'/data/file_st"),
        ("/sys", {}, INTERNAL_ERROR, "(Permission|Read-only).*: '/sys/mooncake-store.ssd'"),
        (None, {"TOTAL": "1 TiB"}, INVALID_PARAMS, "TOTAL_SIZE_LIMIT_BYTES must be a number of by"),
        (None, {"TOTAL": str(BUCKET)}, INVALID_PARAMS, "^setup: MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT"),
        (None, {"TOTAL": str(1 << 60)}, INTERNAL_ERROR, "No space left on device|File too large"),
        (None, {"BUCKET": "4097"}, INVALID_PARAMS, "^setup: MOONCAKE_OFFLOAD_BUCKET_SIZE_LIMIT_B"),
    ],
)
def test_invalid_folders_and_sizes(
    path, folder, monkeypatch, caplog, where, variables, code, reason
):
    for name, text in variables.items():
        monkeypatch.setenv(f"MOONCAKE_OFFLOAD_{name}_SIZE_LIMIT_BYTES", text)
    where = str(folder) if where is None else where
    assert code_of_setup(path, enable_ssd_offload=True, ssd_offload_path=where) == code
    reasons(caplog, reason)
    assert not list(folder.iterdir())


def test_ssd_file_with_other_bucket_size_is_left_alone(path, folder, monkeypatch, caplog):
    with_ssd(path, folder).close()
    ssd = {"enable_ssd_offload": True, "ssd_offload_path": str(folder)}
    monkeypatch.setenv("MOONCAKE_OFFLOAD_BUCKET_SIZE_LIMIT_BYTES", str(2 * BUCKET))
    assert code_of_setup(path, **ssd) == INVALID_PARAMS
    reasons(caplog, f"MOONCAKE_OFFLOAD_BUCKET_SIZE_LIMIT_BYTES must be {BUCKET}, as .* has them")
    monkeypatch.setenv("MOONCAKE_OFFLOAD_BUCKET_SIZE_LIMIT_BYTES", str(BUCKET))
    monkeypatch.setenv("MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES", str(IN_FILE // 2))
    assert code_of_setup(path, **ssd) == INVALID_PARAMS
    reasons(caplog, "MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES must not be less than ")
    monkeypatch.setenv("MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES", str(2 * IN_FILE))
    assert code_of_setup(path, **ssd) == 0


def test_a_folder_alone_enables_nothing(path, folder):
    store = set_up(path, ssd_offload_path=str(folder))
    assert store.put("a", b"1") == 0 and not list(folder.iterdir())
    store.close()
    assert set_up(path, ssd_offload_path="none").get("a") == b"1"


def test_ssd_in_a_cluster(folder, server, caplog):
    """Others read from its SSD, and it has that again after a restart."""
    settings = settings_of(server.url, IN_POOL)
    offloading = settings | {"enable_ssd_offload": True, "ssd_offload_path": str(folder)}
    assert MooncakeDistributedStore().setup(offloading | {"global_segment_size": 0}) == -600
    reasons(caplog, "global_segment_size must be above 0 with enable_ssd_offload")
    store = MooncakeDistributedStore()
    assert store.setup(offloading) == 0
    put_each(store)
    assert store.put(LONG, b"long") == 0
    assert are_on_disk(store, *KEYS[:50])
    with processes(settings) as (other,):
        assert other.call("get_batch", KEYS[:4]) == VALUES[:4]
        assert other.call("get_size", KEYS[4]) == store.get_size(KEYS[5]) == SIZE
        assert store.get_batch(KEYS) == VALUES
        assert other.call("remove", KEYS[0]) == other.call("upsert", KEYS[1], b"new") == 0
        assert store.batch_is_exist(KEYS[:2]) == [0, 1] and store.get(KEYS[1]) == b"new"
        assert store.batch_replica_clear(KEYS[2:4], store.get_hostname()) == KEYS[2:4]
        on_disk = [key for key in KEYS[4:] if are_on_disk(store, key)]
        store.close()
        again = MooncakeDistributedStore()
        assert again.setup(offloading) == 0
        eventually(lambda: all(other.call("batch_is_exist", on_disk)), "they are not listed")
        for key in on_disk[::10]:
            assert again.get(key) == other.call("get", key) == VALUES[KEYS.index(key)]
        assert again.batch_is_exist(KEYS[:4]) == [0, 1, 0, 0]
        assert again.remove_by_regex("^k") >= len(on_disk)
        assert not any(other.call("batch_is_exist", KEYS))
        again.close()
