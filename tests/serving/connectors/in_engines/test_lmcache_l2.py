"""LMCache's second level by its own plugin loader, storage manager and controllers, on the CPU."""

import os
import select
import uuid

import pytest
import torch

pytest.importorskip("lmcache", reason="no LMCache: see make_engines")

from lmcache.v1.distributed.api import (
    GroupedObjectKeys,
    MemoryLayoutDesc,
    ObjectKey,
    PrefetchTaskSpec,
)
from lmcache.v1.distributed.config import (
    EvictionConfig,
    L1ManagerConfig,
    L1MemoryManagerConfig,
    StorageManagerConfig,
)
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import L2AdaptersConfig
from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig
from lmcache.v1.distributed.storage_manager import StorageManager
from lmcache.v1.memory_management import MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.platform import consume_fd

from mooncake_kernels.errors import InvalidArgument
from tests.waiting import eventually

SHAPE, DTYPE = torch.Size([2, 3, 16, 64]), torch.float16
LAYOUT = MemoryLayoutDesc([SHAPE], [DTYPE])
WAIT_S = 120


def plugin(url, **options):
    params = {
        "module_path": "mooncake_serving.connectors.lmcache.l2",
        "class_name": "StoreL2Adapter",
        "adapter_params": {"url": url} | options,
    }
    return PluginL2AdapterConfig.from_dict(params)


def keys_of(*numbers, model="llama", rank=0, group=0, salt=""):
    return [ObjectKey(bytes([number]) * 32, model, rank, group, salt) for number in numbers]


class Server:
    """LMCache's storage manager: memory on the host, and the store behind it."""

    def __init__(self, url, **options):
        memory = L1MemoryManagerConfig(16 << 20, use_lazy=False, shm_name="")
        self.manager = StorageManager(
            StorageManagerConfig(
                L1ManagerConfig(memory),
                EvictionConfig("LRU"),
                L2AdaptersConfig([plugin(url, **options)]),
            )
        )
        [(_, self.adapter)] = self.manager.l2_adapters()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.manager.close()

    def write(self, keys, seed, layout=LAYOUT):
        """Have objects stored, as after a prefill; returns what they hold."""
        objects = self.manager.reserve_write(keys, layout)
        values = []
        for i, key in enumerate(keys):
            value = value_of(seed + i, layout)
            objects[key].raw_data.view(torch.uint8)[: value.numel()] = value
            values.append(value)
        self.manager.finish_write(keys)
        eventually(lambda: self.adapter._store.exists_each(self.names(keys, layout)).all())
        return values

    def names(self, keys, layout=LAYOUT):
        forms = [self.adapter._form_of(key, {key.object_group_id: layout}) for key in keys]
        return self.adapter._names(keys, forms)

    def prefetch(self, keys, layout=LAYOUT, policy="full"):
        """Have objects brought into the memory on the host; what they hold, None for a miss."""
        group = GroupedObjectKeys(keys, keys[0].object_group_id, layout)
        handle = self.manager.submit_prefetch_task(
            PrefetchTaskSpec([group], fetching_policy=policy)
        )
        assert self.manager.wait_prefetch_status(handle, WAIT_S)
        [hits] = self.manager.query_prefetch_status(handle).hit_cells
        there = [keys[i] for i in hits.get_indices_list()]
        if not there:
            return [None] * len(keys)
        with self.manager.read_prefetched_results(there) as objects:
            size = layout.shapes[0].numel() * layout.dtypes[0].itemsize
            found = [one.raw_data.view(torch.uint8)[:size].clone() for one in objects]
        self.manager.finish_read_prefetched(there)
        found = dict(zip(there, found, strict=True))
        return [found.get(key) for key in keys]


def value_of(seed, layout=LAYOUT):
    size = layout.shapes[0].numel() * layout.dtypes[0].itemsize
    return torch.randint(
        0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


def same(found, expected):
    return all(
        one is not None and torch.equal(one, two) for one, two in zip(found, expected, strict=True)
    )


@pytest.fixture(params=["shm", "tiered", "redis"])
def url(request, tmp_path):
    if request.param == "shm":
        return f"shm:{tmp_path}/kv?size=4MiB"
    if request.param == "tiered":
        return f"tiered:{tmp_path}?memory=4MiB&disk=64MiB&pool={tmp_path}/kv"
    if "MK_TEST_REDIS" not in os.environ:
        pytest.skip("MK_TEST_REDIS names no redis-server")
    cluster = f"test-{uuid.uuid4().hex}"
    return f"{os.environ['MK_TEST_REDIS']}?size=4MiB&pool={tmp_path}/kv&cluster={cluster}"


def test_objects_that_one_server_stored_are_prefetched_by_another(url):
    keys = keys_of(1, 2, 3)
    with Server(url) as first:
        values = first.write(keys, seed=1)
    with Server(url) as second:
        assert same(second.prefetch(keys), values)
        assert second.prefetch(keys_of(9)) == [None]
        assert second.adapter.report_status()["failures"] == {}


def test_object_missing_in_the_middle_is_the_only_miss(url):
    keys = keys_of(1, 2, 3)
    with Server(url) as first:
        values = first.write(keys[:1] + keys[2:], seed=1)
    with Server(url) as second:
        found = second.prefetch(keys)
        assert found[1] is None and same([found[0], found[2]], values)
    with Server(url) as third:
        found = third.prefetch(keys, policy="prefix")
        assert found[1:] == [None, None] and torch.equal(found[0], values[0])


@pytest.mark.parametrize(
    "other",
    [{"model": "qwen"}, {"rank": 1}, {"group": 1}, {"salt": "tenant"}],
)
def test_other_keys_are_other_objects(tmp_path, other):
    url = f"shm:{tmp_path}/kv?size=4MiB"
    with Server(url) as first:
        first.write(keys_of(1), seed=1)
    with Server(url) as second:
        assert second.prefetch(keys_of(1, **other)) == [None]
        assert second.prefetch(keys_of(1))[0] is not None
    with Server(url, namespace="team") as third:
        assert third.prefetch(keys_of(1)) == [None]


def test_other_dtype_of_the_same_size_is_another_object(tmp_path):
    url = f"shm:{tmp_path}/kv?size=4MiB"
    other = MemoryLayoutDesc([SHAPE], [torch.bfloat16])
    with Server(url) as first:
        values = first.write(keys_of(1), seed=1)
    with Server(url) as second:
        assert second.prefetch(keys_of(1), other) == [None]
    with Server(url) as third:
        assert same(third.write(keys_of(1), 5, other), [value_of(5, other)])
    with Server(url) as fourth:
        assert same(fourth.prefetch(keys_of(1)), values)


def test_object_lost_between_lookup_and_load_is_a_miss(tmp_path):
    keys = keys_of(1, 2)
    with Server(f"shm:{tmp_path}/kv?size=4MiB") as first:
        values = first.write(keys, seed=1)
    with Server(f"shm:{tmp_path}/kv") as second:
        get_each = second.adapter._store.get_each

        def lose(names, *places):
            second.adapter._store.remove_each(names[1:2])
            return get_each(names, *places)

        second.adapter._store.get_each = lose
        found = second.prefetch(keys)
        assert torch.equal(found[0], values[0]) and found[1] is None


class Object:
    """Memory of one object."""

    def __init__(self, seed=None, shape=SHAPE):
        size = SHAPE.numel() * DTYPE.itemsize
        self.bytes = torch.zeros(size, dtype=torch.uint8) if seed is None else value_of(seed)
        meta = MemoryObjMetadata(shape, DTYPE, 0, size, 1, shapes=[shape], dtypes=[DTYPE])
        self.object = TensorMemoryObj(self.bytes, meta, None)


def wait_for(fd):
    assert select.select([fd], [], [], WAIT_S)[0]
    consume_fd(fd)


@pytest.fixture
def adapter(tmp_path):
    adapter = create_l2_adapter(plugin(f"shm:{tmp_path}/kv?size=1MiB"))
    yield adapter
    adapter.close()
    adapter.close()


def store(adapter, keys, objects):
    task = adapter.submit_store_task(keys, [one.object for one in objects])
    wait_for(adapter.get_store_event_fd())
    return adapter.pop_completed_store_tasks()[task]


def load(adapter, keys, objects):
    task = adapter.submit_load_task(keys, [one.object for one in objects])
    wait_for(adapter.get_load_event_fd())
    result = adapter.query_load_result(task)
    assert adapter.query_load_result(task) is None
    return result.get_indices_list()


def lookup(adapter, keys, layouts):
    task = adapter.submit_lookup_and_lock_task(keys, layouts)
    wait_for(adapter.get_lookup_and_lock_event_fd())
    result = adapter.query_lookup_and_lock_result(task)
    assert adapter.query_lookup_and_lock_result(task) is None
    adapter.submit_unlock(keys)
    return result.get_indices_list()


def test_each_kind_of_task_has_an_event_of_its_own(adapter):
    fds = {
        adapter.get_store_event_fd(),
        adapter.get_lookup_and_lock_event_fd(),
        adapter.get_load_event_fd(),
    }
    assert len(fds) == 3 and adapter.query_load_result(99) is None
    keys, objects = keys_of(1, 2), [Object(1), Object(2)]
    result = store(adapter, keys, objects)
    assert result.is_successful() and result.bytes_transferred() == 2 * len(objects[0].bytes)
    assert store(adapter, keys, objects).bytes_transferred() == 0  # they are there
    assert lookup(adapter, keys_of(1, 3, 2), {0: LAYOUT}) == [0, 2]
    assert lookup(adapter, keys, {}) == [0, 1]  # of the form that was stored last
    targets = [Object(), Object(), Object()]
    assert load(adapter, keys_of(1, 3, 2), targets) == [0, 2]
    assert torch.equal(targets[2].bytes, objects[1].bytes) and not targets[1].bytes.any()
    used = adapter.get_usage()
    assert 0 < used.total_bytes_used < used.total_capacity_bytes == 1 << 20
    adapter.delete(keys[:1])
    assert lookup(adapter, keys, {}) == [1]


def test_objects_are_deleted_whatever_their_form(adapter):
    forms, keys = [SHAPE, torch.Size([SHAPE.numel()])], keys_of(1, 2, 3)
    for key, shape in zip(keys, [*forms, forms[0]], strict=True):
        store(adapter, [key], [Object(1, shape)])
    layouts = [{0: MemoryLayoutDesc([shape], [DTYPE])} for shape in forms]
    assert [lookup(adapter, keys, layout) for layout in layouts] == [[0, 2], [1]]
    adapter.delete(keys[:2])
    assert [lookup(adapter, keys, layout) for layout in layouts] == [[2], []]


def test_full_store_evicts_and_looked_up_objects_stay(adapter):
    object_ = Object(1)
    store(adapter, keys_of(0), [object_])
    for number in range(1, 200):
        assert store(adapter, keys_of(number), [object_]).is_successful()
        assert lookup(adapter, keys_of(0), {}) == [0]
    assert lookup(adapter, keys_of(1, 199), {}) == [1]


def test_failing_store_is_a_miss(adapter, monkeypatch):
    def fail(*_, **__):
        raise OSError("the memory is gone")

    for call in ("put_headed", "exists_each", "get_into_each"):
        monkeypatch.setattr(adapter._store._store, call, fail)
    for _ in range(3):
        assert not store(adapter, keys_of(1), [Object(1)]).is_successful()
        assert lookup(adapter, keys_of(1), {}) == [] == load(adapter, keys_of(1), [Object()])
    assert adapter.report_status()["failures"]["store: OSError"] == 3
    monkeypatch.setattr(adapter, "_memory", fail)  # an error of our own also ends a task
    assert not store(adapter, keys_of(1), [Object(1)]).is_successful()
    assert load(adapter, keys_of(1), [Object()]) == []


@pytest.mark.parametrize(
    "options, message",
    [
        ({"url": "s3://bucket"}, "open_store: url must be"),
        ({"path": "/dev/shm/kv"}, "adapter_params must be no others than url, .*, got path"),
        ({"namespace": 3}, "namespace must be a str, got 3"),
        ({"num_threads": True}, "num_threads must be an integer from 1 to 64, got True"),
    ],
)
def test_wrong_parameters_are_refused_when_the_server_starts(tmp_path, options, message):
    with pytest.raises(InvalidArgument, match=message):
        create_l2_adapter(plugin(**{"url": f"shm:{tmp_path}/kv?size=4MiB"} | options))
